"""The laws that every mechanism obeys, and ``check``, which runs them on one."""
