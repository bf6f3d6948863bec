"""Entry point of the group `vllm.general_plugins`.

vLLM calls `register` in the front end, the engine core, every worker and its inspection process,
and some of them more than once: it is idempotent, cheap and starts no device.
"""

MODEL_IMPL = "isomodels"


def register() -> None:
    """Makes `--model-impl isomodels` known to vLLM. Nothing changes for any other value."""
    from isomodels.vllm import patches

    patches.install()
    _register_mimo_config()


def _register_mimo_config() -> None:
    """`model_type` "mimo" is unknown to transformers, and vLLM reads configs through it."""
    from transformers import AutoConfig, Qwen2Config
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if "mimo" in CONFIG_MAPPING:
        return

    class MiMoConfig(Qwen2Config):
        model_type = "mimo"

    AutoConfig.register("mimo", MiMoConfig)
