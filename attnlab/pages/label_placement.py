"""Where the names beside a scatter chart's points go, such that no name covers a marker or another name."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["marker_boxes", "place_labels", "place_reference", "text_width"]

# The box of a chart, and the part of it between the axes.
WIDTH = 560
LEFT, RIGHT, TOP, BOTTOM = 62, 540, 34, 278
# The least distance between the lines of two labels.
LABEL_GAP = 14.0
# From a point to its label.
LABEL_OFFSET = 9
# Half of a marker, and some air.
MARKER = 8.0

# Left, right, and the height of the middle.
Box = tuple[float, float, float]


def text_width(text: str) -> float:
    """About how wide a text is, in the chart's units."""
    return 6.3 * len(text)


def marker_boxes(places: Sequence[tuple[float, float]]) -> list[Box]:
    """The boxes that the markers at these places cover."""
    return [(x - MARKER, x + MARKER, y) for x, y in places]


def place_reference(name: str, level: float, taken: Sequence[Box]) -> tuple[bool, bool, Box]:
    """(at the left end, below the line, its box) for the name of a horizontal line: the first place that is free."""
    width = text_width(name)
    ends = {False: (RIGHT - width, float(RIGHT)), True: (LEFT + 6.0, LEFT + 6.0 + width)}
    places = [
        (left, below, (*ends[left], level + (10 if below else -10)))
        for below in (False, True)
        for left in (False, True)
    ]
    free = [place for place in places if not any(_overlap(place[2], box) for box in taken)]
    return (free or places)[0]


def place_labels(
    places: Sequence[tuple[float, float]], widths: Sequence[float], taken: Sequence[Box]
) -> list[tuple[bool, float]]:
    """For each point whether its label stands to its left, and how high; no label covers another or a taken box."""
    boxes = list(taken)
    labels = [(False, 0.0)] * len(places)
    for i in sorted(range(len(places)), key=lambda i: places[i][1]):
        (x, y), width = places[i], widths[i]
        left_first = x > (LEFT + RIGHT) * 0.55
        sides = {
            True: (x - LABEL_OFFSET - width, x - LABEL_OFFSET),
            False: (x + LABEL_OFFSET, x + LABEL_OFFSET + width),
        }
        tried = [(side, _nearest_free((*sides[side], y), boxes)) for side in (left_first, not left_first)]
        inside = [(side, box) for side, box in tried if box[0] >= LEFT and box[1] <= WIDTH] or tried[:1]
        side, box = min(inside, key=lambda choice: abs(choice[1][2] - places[i][1]))
        labels[i] = (side, box[2])
        boxes.append(box)
    return labels


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[1] and other[0] < one[1] and abs(one[2] - other[2]) < LABEL_GAP


def _nearest_free(box: Box, taken: Sequence[Box]) -> Box:
    """The box, moved up or down by as little as makes it overlap none of the others."""
    left, right, y = box
    heights = (y + LABEL_GAP / 2 * step for step in sorted(range(-12, 13), key=abs))
    free = (
        height
        for height in heights
        if TOP <= height <= BOTTOM and not any(_overlap((left, right, height), other) for other in taken)
    )
    return left, right, next(free, y)
