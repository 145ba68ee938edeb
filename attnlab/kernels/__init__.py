"""Triton twins of mechanisms, same stem as theirs; imported only when a tensor on a GPU asks for one."""
