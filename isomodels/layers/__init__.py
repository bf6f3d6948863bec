"""Bricks that two or more architectures use. T: tokens, H: hidden size, D: head size."""
