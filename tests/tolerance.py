"""The tests compare with the tolerances of the conformance laws."""

from attnlab.conformance.tolerance import assert_close

__all__ = ["assert_close"]
