"""A tiny real Flux, whole weights trained, and the settings under which accelerate shards it on CPU ranks."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from simpletuner_gh200.demo.project import clip_text_encoder, clip_tokenizer
from tests.integration.workbench import Workbench, probe

ROOT = Path(__file__).parents[2]
SWITCH = probe("fsdp2")
ACCELERATE_FILE = ROOT / "config" / "accelerate_config_gh200_fsdp2.yaml"

FULL_TRAINING = {
    "model_family": "flux",
    "model_type": "full",
    "optimizer": "torch-adamw",
    "learning_rate": 1e-3,
    "mixed_precision": "no",
    "tokenizer_max_length": 16,
    "flux_attention_masked_training": False,
}
"""What differs from the tiny SDXL's configuration."""

FSDP2 = {
    "fsdp_enable": True,
    "fsdp_version": 2,
    "fsdp_reshard_after_forward": True,
    "fsdp_activation_checkpointing": True,
    "fsdp_limit_all_gathers": True,
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_transformer_layer_cls_to_wrap": "FluxTransformerBlock,FluxSingleTransformerBlock",
}
"""As config/gh200_fsdp2_example.json has them; a test holds the two together."""


class FluxWorkbench(Workbench):
    """The same project with a Flux for its model, all of whose weights are trained."""

    def prepare(self) -> None:
        write_tiny_flux(self.project.model)
        super().prepare()

    def configure(self, **changes: Any) -> None:
        super().configure(**{**FULL_TRAINING, **changes})


def launcher_environment(path: Path = ACCELERATE_FILE) -> dict[str, str]:
    """What ``accelerate launch`` makes of the file for its ranks, by accelerate's own launcher."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    given = launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
    args, _, _ = _validate_launch_command(given)
    made = prepare_multi_gpu_env(argparse.Namespace(**{**vars(args), "gpu_ids": "all"}))
    return {name: value for name, value in made.items() if name.startswith(("FSDP_", "ACCELERATE_USE_FSDP"))}


def write_tiny_flux(folder: Path) -> None:
    if (folder / "model_index.json").is_file():
        return
    import torch
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

    torch.manual_seed(7)
    pipeline = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=AutoencoderKL(
            block_out_channels=(8, 8, 8, 8),
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            latent_channels=16,
            norm_num_groups=4,
            sample_size=64,
            use_quant_conv=False,
            use_post_quant_conv=False,
            shift_factor=0.1,
            scaling_factor=0.36,
        ),
        text_encoder=clip_text_encoder(with_projection=False),
        tokenizer=_clip_tokenizer(folder / "tokenizer"),
        text_encoder_2=_t5(),
        tokenizer_2=_t5_tokenizer(),
        transformer=FluxTransformer2DModel(
            in_channels=64,
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            pooled_projection_dim=32,
            guidance_embeds=True,
            axes_dims_rope=(4, 4, 8),
        ),
    )
    pipeline.save_pretrained(folder)


def _clip_tokenizer(folder: Path) -> Any:
    made = clip_tokenizer(folder)
    made.model_max_length = 77  # Flux asks the tokenizer, SDXL knows
    return made


def _t5() -> Any:
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(
        T5Config(vocab_size=len(_pieces()), d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, dense_act_fn="gelu")
    )


def _pieces() -> list[tuple[str, float]]:
    """A unigram vocabulary of single characters."""
    letters = [chr(code) for code in range(33, 127)]
    return [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -9.0), ("▁", -2.0), *((letter, -3.0) for letter in letters)]


def _t5_tokenizer() -> Any:
    from transformers import T5Tokenizer

    return T5Tokenizer(vocab=_pieces(), extra_ids=0)
