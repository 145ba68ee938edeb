"""The tests compare with the tolerances of the conformance laws."""

from attnlab.conformance.tolerance import RELATIVE, assert_close

__all__ = ["RELATIVE", "assert_close"]
