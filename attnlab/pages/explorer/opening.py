"""The head that a page opens on: the one whose attention depends most on what the tokens are."""

from __future__ import annotations

import numpy as np

__all__ = ["telling_share"]


def telling_share(maps: np.ndarray) -> np.ndarray:
    """(head,) of maps (head, query, key): what a query gives to one key beyond what is explained without content.

    Three things explain a weight without the tokens' content: a query that gives all its keys the same, what the key
    receives on average from all queries (a sink, a separator), and what keys at this distance receive on average (the
    token before, the next one); each average is without the weight in question. The share is a query's largest weight
    beyond the largest of the three, averaged over queries. The first key and the query itself do not count: they are
    where heads look that have nothing to look for.

    >>> here, first, pairs = np.eye(4), np.eye(4)[[0, 0, 0, 0]], np.eye(4)[[3, 2, 1, 1]]
    >>> telling_share(np.stack([here, first, pairs])).tolist()
    [0.0, 0.0, 0.708333]
    """
    w = np.nan_to_num(maps.astype(np.float64), posinf=0.0, neginf=0.0)
    _, queries, keys = w.shape
    visible = np.ones((queries, keys))
    if queries == keys and not np.triu(w, 1).any():
        visible = np.tril(visible)
    explained = np.maximum(
        1 / visible.sum(1, keepdims=True), _mean_of_others(w, w.sum(1, keepdims=True), visible.sum(0))
    )
    if queries == keys:
        distance = np.subtract.outer(np.arange(queries), np.arange(keys)) + keys - 1
        sums = np.stack([np.bincount(distance.ravel(), head.ravel()) for head in w])
        counts = np.bincount(distance.ravel())
        explained = np.maximum(explained, _mean_of_others(w, sums[:, distance], counts[distance]))
        w = w * (1 - np.eye(queries))
    w[:, :, 0] = 0
    return np.maximum(w - explained, 0).max(2).mean(1).round(6)


def _mean_of_others(w: np.ndarray, sums: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The mean of a weight's row, column or diagonal without the weight itself; 0 where it is alone."""
    return (sums - w) / np.maximum(counts - 1, 1)
