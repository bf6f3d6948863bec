"""One PyTorch module per architecture, run with equal bits by vLLM and by Megatron."""

__version__ = "0.1.0.dev0"
