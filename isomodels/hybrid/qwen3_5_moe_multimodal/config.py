"""config.json of Qwen3.5-MoE models with a vision tower."""

from isomodels.hybrid.qwen3_5_moe.config import TINY as TEXT
from isomodels.hybrid.qwen3_5_moe.config import Qwen3_5MoeConfig
from isomodels.layers.multimodal import MultimodalConfig


class Qwen3_5MoeMultimodalConfig(MultimodalConfig, Qwen3_5MoeConfig):
    """The text model inside; the vision tower is only carried."""


TINY = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "text_config": {k: v for k, v in TEXT.items() if k != "architectures"},
    "tie_word_embeddings": False,
    "image_token_id": 1,
    "video_token_id": 2,
    "vision_start_token_id": 3,
    "vision_end_token_id": 4,
    "vision_config": {
        "model_type": "qwen3_5_moe",
        "depth": 1,
        "hidden_size": 32,
        "hidden_act": "gelu_pytorch_tanh",
        "intermediate_size": 64,
        "num_heads": 2,
        "in_channels": 3,
        "patch_size": 4,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "out_hidden_size": 128,
        "num_position_embeddings": 16,
    },
}
