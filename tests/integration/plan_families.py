"""Tiny models of seven families, and one real training step of each through SimpleTuner's own trainer, byte by byte.

Everything is real but the size: weights are written and loaded, the adapter and the optimizer are SimpleTuner's, the
step is computed. Only the data is made up, since it has no influence on sizes.
"""

from __future__ import annotations

import gc
import json
import tempfile
from pathlib import Path
from typing import Any

from tests.integration.probe_plan import install

UNET = {
    "sample_size": 16,
    "in_channels": 4,
    "out_channels": 4,
    "layers_per_block": 1,
    "block_out_channels": [32, 64],
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
    "cross_attention_dim": 64,
    "attention_head_dim": [2, 4],
    "norm_num_groups": 8,
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "transformer_layers_per_block": [1, 2],
    "projection_class_embeddings_input_dim": 80,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "sdxl": UNET,
    "sd3": {
        "sample_size": 16,
        "patch_size": 2,
        "in_channels": 16,
        "out_channels": 16,
        "num_layers": 5,
        "attention_head_dim": 16,
        "num_attention_heads": 4,
        "joint_attention_dim": 32,
        "caption_projection_dim": 64,
        "pooled_projection_dim": 32,
        "pos_embed_max_size": 16,
        "qk_norm": "rms_norm",
    },
    "flux": {
        "patch_size": 1,
        "in_channels": 64,
        "num_layers": 4,
        "num_single_layers": 6,
        "attention_head_dim": 16,
        "num_attention_heads": 4,
        "joint_attention_dim": 32,
        "pooled_projection_dim": 32,
        "guidance_embeds": True,
        "axes_dims_rope": [4, 4, 8],
    },
    "pixart": {
        "sample_size": 16,
        "patch_size": 2,
        "in_channels": 4,
        "out_channels": 8,
        "num_layers": 5,
        "attention_head_dim": 16,
        "num_attention_heads": 4,
        "cross_attention_dim": 64,
        "caption_channels": 32,
        "norm_type": "ada_norm_single",
        "norm_elementwise_affine": False,
    },
    "wan": {
        "patch_size": [1, 2, 2],
        "num_attention_heads": 4,
        "attention_head_dim": 24,
        "in_channels": 16,
        "out_channels": 16,
        "text_dim": 32,
        "freq_dim": 32,
        "ffn_dim": 128,
        "num_layers": 5,
        "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads",
        "rope_max_seq_len": 64,
    },
    "qwen_image": {
        "patch_size": 2,
        "in_channels": 64,
        "out_channels": 16,
        "num_layers": 5,
        "attention_head_dim": 16,
        "num_attention_heads": 4,
        "joint_attention_dim": 32,
        "axes_dims_rope": [4, 6, 6],
    },
    "z_image": {
        "all_patch_size": [2],
        "all_f_patch_size": [1],
        "in_channels": 16,
        "dim": 64,
        "n_layers": 5,
        "n_refiner_layers": 2,
        "n_heads": 4,
        "n_kv_heads": 4,
        "cap_feat_dim": 32,
        "axes_dims": [4, 6, 6],
        "axes_lens": [512, 64, 64],
    },
}
LATENTS = {"wan": (3, 16, 16)}
BATCH, TOKENS = 2, 48


def latent_of(family: str) -> tuple[int, ...]:
    return LATENTS.get(family, (16, 16))


def options(family: str, *, full: bool, checkpointing: bool, precision: str = "no") -> dict[str, Any]:
    """SimpleTuner's own, as a configuration would have them."""
    return {
        "model_family": family,
        "model_type": "full" if full else "lora",
        "lora_type": "standard",
        "lora_rank": 8,
        "mixed_precision": precision,
        "base_model_precision": "no_change",
        "optimizer": "torch-adamw",
        "learning_rate": 1e-4,
        "lr_scheduler": "constant",
        "train_batch_size": BATCH,
        "max_train_steps": 2,
        "num_train_epochs": 0,
        "resolution": 128,
        "gradient_checkpointing": checkpointing,
        "disable_benchmark": True,
        "validation_disable": True,
        "report_to": "none",
    }


def measure(family: str, given: dict[str, Any], record: dict[str, Any]) -> dict[str, int]:
    """Bytes of weights, gradients, optimizer state, saved tensors, and the most that was alive beyond the weights.

    As ``probe_plan`` counts them into ``record``.
    """
    from accelerate.state import AcceleratorState
    from simpletuner.helpers.training.trainer import Trainer

    from simpletuner_gh200.seams.trace import build
    from simpletuner_gh200.seams.trace.step import make_batch

    AcceleratorState._reset_state(True)
    with tempfile.TemporaryDirectory() as folder, build.schedulers_by_default():
        datasets = Path(folder, "datasets.json")
        datasets.write_text("[]")
        mine = {**given, "output_dir": folder, "data_backend_config": str(datasets)}
        mine["pretrained_model_name_or_path"] = folder
        trainer = Trainer(config={f"--{key}": value for key, value in mine.items()}, exit_on_error=True)
        foundation = trainer.model
        foundation.MODEL_CLASS.from_config(FAMILIES[family]).save_pretrained(Path(folder, foundation.MODEL_SUBFOLDER))
        trainer.config.pretrained_model_name_or_path = folder
        trainer.init_load_base_model()
        trainer.init_precision()
        trainer.init_freeze_models()
        trainer.init_trainable_peft_adapter()
        trainer.move_models(destination="accelerator")
        trainer.config.total_steps_remaining_at_start = trainer.config.max_train_steps
        trainer.init_optimizer()
        model = foundation.get_trained_component(unwrap_model=False)
        if trainer.lycoris_wrapped_network is not None:
            model.add_module("lycoris_wrapped_network", trainer.lycoris_wrapped_network)
        model, optimizer = trainer.accelerator.prepare(model, trainer.optimizer)
        foundation.set_prepared_model(model)
        trainer.init_post_load_freeze()
        model.train()
        batch = make_batch(
            (BATCH, foundation.LATENT_CHANNEL_COUNT, *latent_of(family)), tokens=TOKENS, config=FAMILIES[family]
        )
        batch = trainer.prepare_batch(batch)
        gc.collect()
        output = trainer.model_predict(prepared_batch=batch)
        loss = foundation.loss(prepared_batch=batch, model_output=output, apply_conditioning_mask=True)
        del output
        trainer.accelerator.backward(loss)
        optimizer.step()
        parameters = sum(p.numel() for p in model.parameters())
    foundation.set_prepared_model(None)
    return {**record["measured"].pop(), "parameters": parameters, "state": record["state"]}


def measure_all(cases: Path, answers: Path) -> None:
    """In a child of the forge, which has imported SimpleTuner: a list of cases, and what was measured of each."""
    record: dict[str, Any] = {}
    install(record)
    measured = [measure(family, options, record) for family, options in json.loads(cases.read_text())]
    answers.write_text(json.dumps(measured))
