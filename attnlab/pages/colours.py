"""The one place for colours: categorical, sequential, and diverging around zero, for light and dark pages.

The categorical colours are Okabe and Ito's, darkened or lightened until lines have contrast 3 : 1 on their background;
the scales run through one hue (sequential) or from blue to orange (diverging), which every kind of colour vision tells
apart. Pages name a step (``var(--seq-7)``), so the same picture is right in both themes.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["CATEGORIES", "category", "diverging", "sequential", "theme_css"]

SEQUENTIAL_STEPS = 16
DIVERGING_STEPS = 17

THEMES: dict[str, dict[str, Sequence[str]]] = {
    "light": {
        "seq": ("#f3f6fa", "#c8dcee", "#82b3da", "#3a82bd", "#125490", "#0a2f5c"),
        "div": ("#0b4a8a", "#5b9bd0", "#cfe0ee", "#f5f5f4", "#f6dcc0", "#e0914a", "#9a4706"),
        "cat": ("#0072b2", "#d55e00", "#008a66", "#b1508a", "#a07000", "#6b5bb5", "#5c6773"),
    },
    "dark": {
        "seq": ("#1b222c", "#1f3d5e", "#2a689f", "#4c9bd6", "#94c9ee", "#e3f2fd"),
        "div": ("#9fd0f7", "#4a92cf", "#24476a", "#1e242c", "#5c3b1c", "#d07f35", "#ffc78f"),
        "cat": ("#5aaee8", "#f58f4c", "#3cc79e", "#e591c3", "#e2b544", "#a99cf2", "#a7b2c0"),
    },
}
CATEGORIES = len(THEMES["light"]["cat"])

SURFACES = {
    "light": {
        "paper": "#f7f8fa",
        "card": "#ffffff",
        "sunken": "#f1f4f7",
        "line": "#e1e6ec",
        "text": "#17202b",
        "muted": "#566273",
        "accent": "#0067a3",
        "held": "#0a6e50",
        "failed": "#b23a06",
        "shadow": "0 1px 2px rgb(20 30 45 / 5%), 0 4px 16px rgb(20 30 45 / 4%)",
    },
    "dark": {
        "paper": "#10141a",
        "card": "#171c24",
        "sunken": "#1e2530",
        "line": "#2b3440",
        "text": "#e7ebf1",
        "muted": "#9ba8b8",
        "accent": "#6cb8ee",
        "held": "#4fd1a8",
        "failed": "#ff9a5c",
        "shadow": "0 1px 2px rgb(0 0 0 / 30%)",
    },
}


def sequential(value: float, *, high: float) -> str:
    """The CSS colour of a magnitude between 0 and ``high``; beyond that it stays at the last step.

    >>> sequential(0.5, high=1.0)
    'var(--seq-8)'
    """
    share = 0.0 if high <= 0 else min(max(value / high, 0.0), 1.0)
    return f"var(--seq-{int(share * (SEQUENTIAL_STEPS - 1) + 0.5)})"


def diverging(value: float, *, high: float) -> str:
    """The CSS colour of a signed number: neutral at zero, blue below, orange above, symmetric in ``high``."""
    share = 0.0 if high <= 0 else min(max(value / high, -1.0), 1.0)
    return f"var(--div-{int((share + 1) / 2 * (DIVERGING_STEPS - 1) + 0.5)})"


def category(index: int) -> str:
    """The class that gives a series its colour; the colours repeat after ``CATEGORIES`` series."""
    return f"c{index % CATEGORIES}"


def theme_css() -> str:
    """Every colour as a CSS variable, for both themes, by preference and by the page's switch."""
    light, dark = _variables("light"), _variables("dark")
    classes = "".join(f".c{i}{{--c:var(--cat-{i})}}" for i in range(CATEGORIES))
    return (
        f":root{{color-scheme:light;{light}}}"
        f"@media (prefers-color-scheme:dark){{:root:not([data-theme=light]){{color-scheme:dark;{dark}}}}}"
        f":root[data-theme=dark]{{color-scheme:dark;{dark}}}{classes}\n"
    )


def _variables(theme: str) -> str:
    named = {**SURFACES[theme]}
    for kind, count in (("seq", SEQUENTIAL_STEPS), ("div", DIVERGING_STEPS), ("cat", CATEGORIES)):
        named |= {f"{kind}-{i}": colour for i, colour in enumerate(_steps(THEMES[theme][kind], count))}
    return "".join(f"--{name}:{value};" for name, value in named.items())


def _steps(anchors: Sequence[str], count: int) -> list[str]:
    """``count`` colours evenly along the anchors, mixed channel by channel."""
    mixed = []
    for i in range(count):
        place = i * (len(anchors) - 1) / (count - 1)
        left = min(int(place), len(anchors) - 2)
        a, b = _channels(anchors[left]), _channels(anchors[left + 1])
        mixed.append("#" + "".join(f"{round(x + (y - x) * (place - left)):02x}" for x, y in zip(a, b, strict=True)))
    return mixed


def _channels(colour: str) -> list[int]:
    return [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
