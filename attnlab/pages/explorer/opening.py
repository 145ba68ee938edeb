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
    [0.0, 0.0, 0.70833]
    """
    w = maps.astype(np.float32)
    w[~np.isfinite(w)] = 0
    _, queries, keys = w.shape
    visible = np.ones((queries, keys), dtype=np.float32)
    if queries == keys and not np.triu(w, 1).any():
        visible = np.tril(visible)
    # What others get: the means are without the weight itself, and 0 where it is alone.
    explained = w.sum(1, keepdims=True) - w
    explained /= np.maximum(visible.sum(0) - 1, 1)
    np.maximum(explained, 1 / visible.sum(1, keepdims=True), out=explained)
    if queries == keys:
        distance = np.subtract.outer(np.arange(queries), np.arange(keys)) + keys - 1
        sums = np.stack([np.bincount(distance.ravel(), head.ravel()) for head in w]).astype(np.float32)
        others = sums[:, distance]
        others -= w
        others /= np.maximum(np.bincount(distance.ravel()) - 1, 1).astype(np.float32)[distance]
        np.maximum(explained, others, out=explained)
        w[:, range(keys), range(keys)] = 0
    w[:, :, 0] = 0
    w -= explained
    return np.maximum(w.max(2), 0).mean(1).astype(np.float64).round(5)
