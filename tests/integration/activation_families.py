"""Tiny models of SimpleTuner's own classes: gradients with activations moved, recomputed and as they are, and with
weights in slots. Prints JSON.

Run in a process that has imported SimpleTuner, with ``FAMILIES`` and ``COMPARED`` among the globals.
"""

from __future__ import annotations

import contextlib
import itertools
import json

import torch
import torch.utils.checkpoint
from peft import LoraConfig

from simpletuner_gh200.demo.project import tiny_unet
from simpletuner_gh200.memory.lane import lanes
from simpletuner_gh200.memory.slab import Slab
from simpletuner_gh200.model.activations.arena import Arena, Room
from simpletuner_gh200.model.activations.offload import Offloader
from simpletuner_gh200.model.blocks import find_blocks
from simpletuner_gh200.model.catching import HostPool
from simpletuner_gh200.model.gradients import PooledGradients
from simpletuner_gh200.model.slots import WeightStream
from simpletuner_gh200.seams.features.activations.feature import checkpointing_past
from simpletuner_gh200.seams.patch import Patches

LAYERS = ["to_q", "to_k", "to_v", "to_out.0"]


def flux():
    from simpletuner.helpers.models.flux.transformer import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        in_channels=4,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=8,
        pooled_projection_dim=8,
        axes_dims_rope=(4, 4, 8),
    )
    inputs = {
        "hidden_states": torch.randn(2, 9, 4),
        "encoder_hidden_states": torch.randn(2, 5, 8),
        "pooled_projections": torch.randn(2, 8),
        "timestep": torch.tensor([0.3, 0.7]),
        "img_ids": torch.zeros(9, 3),
        "txt_ids": torch.zeros(5, 3),
        "return_dict": False,
    }
    return model, inputs


def sd3():
    from simpletuner.helpers.models.sd3.transformer import SD3Transformer2DModel

    model = SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=3,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=8,
        caption_projection_dim=16,
        pooled_projection_dim=8,
        out_channels=4,
        pos_embed_max_size=8,
    )
    inputs = {
        "hidden_states": torch.randn(2, 4, 8, 8),
        "encoder_hidden_states": torch.randn(2, 5, 8),
        "pooled_projections": torch.randn(2, 8),
        "timestep": torch.tensor([3.0, 7.0]),
        "return_dict": False,
    }
    return model, inputs


def sdxl():
    added = {"text_embeds": torch.randn(2, 32), "time_ids": torch.randn(2, 6)}
    inputs = {
        "sample": torch.randn(2, 4, 8, 8),
        "timestep": torch.tensor([500, 300]),
        "encoder_hidden_states": torch.randn(2, 7, 64),
        "added_cond_kwargs": added,
        "return_dict": False,
    }
    return tiny_unet(), inputs


def qwen():
    """Its rotation is complex, and each block saves most storages more than once."""
    from simpletuner.helpers.models.qwen_image.transformer import QwenImageTransformer2DModel

    model = QwenImageTransformer2DModel(
        in_channels=4,
        out_channels=1,
        num_layers=3,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=8,
        axes_dims_rope=(4, 4, 8),
    )
    inputs = {
        "hidden_states": torch.randn(2, 16, 4),
        "encoder_hidden_states": torch.randn(2, 5, 8),
        "encoder_hidden_states_mask": torch.ones(2, 5, dtype=torch.int64),
        "timestep": torch.tensor([0.3, 0.7]),
        "img_shapes": [[(1, 4, 4)], [(1, 4, 4)]],
        "txt_seq_lens": [5, 5],
        "return_dict": False,
    }
    return model, inputs


def wan():
    """Video: five dimensions, cross attention, parts in float32 whatever the weights are."""
    from simpletuner.helpers.models.wan.transformer import WanTransformer3DModel

    model = WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=8,
        freq_dim=16,
        ffn_dim=32,
        num_layers=3,
    )
    inputs = {
        "hidden_states": torch.randn(2, 4, 2, 4, 4),
        "timestep": torch.tensor([300, 700]),
        "encoder_hidden_states": torch.randn(2, 5, 8),
        "return_dict": False,
    }
    return model, inputs


def pixart():
    from simpletuner.helpers.models.pixart.transformer import PixArtTransformer2DModel

    model = PixArtTransformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=8,
        num_layers=3,
        attention_head_dim=8,
        num_attention_heads=2,
        cross_attention_dim=16,
        caption_channels=8,
        norm_type="ada_norm_single",
        norm_elementwise_affine=False,
    )
    inputs = {
        "hidden_states": torch.randn(2, 4, 8, 8),
        "encoder_hidden_states": torch.randn(2, 5, 8),
        "encoder_attention_mask": torch.ones(2, 5),
        "timestep": torch.tensor([3, 7]),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        "return_dict": False,
    }
    return model, inputs


def z_image():
    """Pictures and captions come as lists, and so does what it predicts; its rotation is complex."""
    from simpletuner.helpers.models.z_image.transformer import ZImageTransformer2DModel

    model = ZImageTransformer2DModel(
        all_patch_size=(2,),
        all_f_patch_size=(1,),
        in_channels=4,
        dim=32,
        n_layers=3,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=8,
        axes_dims=(4, 6, 6),
        axes_lens=(64, 16, 16),
    )
    for padding in (model.x_pad_token, model.cap_pad_token):  # memory as it was found
        torch.nn.init.normal_(padding)
    inputs = {
        "x": [torch.randn(4, 1, 8, 8), torch.randn(4, 1, 8, 8)],
        "t": torch.tensor([0.3, 0.7]),
        "cap_feats": [torch.randn(5, 8), torch.randn(7, 8)],
    }
    return model, inputs


def flux2():
    """Its modulation is shared by all blocks of a kind, and none of them has it."""
    from simpletuner.helpers.models.flux2.transformer import Flux2Transformer2DModel

    model = Flux2Transformer2DModel(
        in_channels=4,
        num_layers=2,
        num_single_layers=3,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=8,
        timestep_guidance_channels=16,
        axes_dims_rope=(4, 4, 4, 4),
    )
    inputs = {
        "hidden_states": torch.randn(2, 9, 4),
        "encoder_hidden_states": torch.randn(2, 5, 8),
        "timestep": torch.tensor([0.3, 0.7]),
        "img_ids": torch.zeros(2, 9, 4),
        "txt_ids": torch.zeros(2, 5, 4),
        "guidance": torch.tensor([1.0, 1.0]),
        "return_dict": False,
    }
    return model, inputs


def ltx():
    from simpletuner.helpers.models.ltxvideo.transformer import LTXVideoTransformer3DModel

    model = LTXVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        cross_attention_dim=32,
        num_layers=3,
        caption_channels=8,
    )
    inputs = {
        "hidden_states": torch.randn(2, 16, 4),
        "encoder_hidden_states": torch.randn(2, 5, 8),
        "timestep": torch.tensor([300, 700]),
        "encoder_attention_mask": torch.ones(2, 5),
        "num_frames": 1,
        "height": 4,
        "width": 4,
        "return_dict": False,
    }
    return model, inputs


def sana():
    """Attention without a softmax, and convolutions inside its blocks."""
    from simpletuner.helpers.models.sana.transformer import SanaTransformer2DModel

    model = SanaTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=3,
        num_cross_attention_heads=2,
        cross_attention_head_dim=8,
        cross_attention_dim=16,
        caption_channels=8,
        sample_size=8,
    )
    inputs = {
        "hidden_states": torch.randn(2, 4, 8, 8),
        "encoder_hidden_states": torch.randn(2, 5, 8),
        "timestep": torch.tensor([300, 700]),
        "encoder_attention_mask": torch.ones(2, 5),
        "return_dict": False,
    }
    return model, inputs


def auraflow():
    """Joint and single blocks, without a bias anywhere."""
    from simpletuner.helpers.models.auraflow.transformer import AuraFlowTransformer2DModel

    model = AuraFlowTransformer2DModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        num_mmdit_layers=2,
        num_single_dit_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=8,
        caption_projection_dim=16,
        pos_embed_max_size=64,
    )
    inputs = {
        "hidden_states": torch.randn(2, 4, 8, 8),
        "encoder_hidden_states": torch.randn(2, 5, 8),
        "timestep": torch.tensor([0.3, 0.7]),
        "return_dict": False,
    }
    return model, inputs


def low(values):
    if isinstance(values, torch.Tensor):
        return values.to(torch.bfloat16) if values.is_floating_point() else values
    if isinstance(values, list):
        return [low(value) for value in values]
    return {key: low(value) for key, value in values.items()} if isinstance(values, dict) else values


def prepared(family, kind, precision):
    torch.manual_seed(3)
    model, inputs = family()
    if kind == "lora":
        model.requires_grad_(False)
        model.add_adapter(LoraConfig(r=4, lora_alpha=4, init_lora_weights=False, target_modules=LAYERS))
    if precision == "bf16":
        model, inputs = model.to(torch.bfloat16), low(inputs)
    return model.train(), inputs


def gradients(model, inputs, precision, around):
    model.zero_grad(set_to_none=True)
    cast = torch.autocast("cpu", torch.bfloat16) if precision == "autocast" else contextlib.nullcontext()
    with around, cast:
        out = model(**inputs)[0]
    (torch.stack(out) if isinstance(out, list) else out).float().square().mean().backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def same(left, right):
    return bool(left) and left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def compare(name, kind, precision):
    model, inputs = prepared(globals()[name], kind, precision)
    plain = gradients(model, inputs, precision, contextlib.nullcontext())
    model.enable_gradient_checkpointing()
    recomputed = gradients(model, inputs, precision, contextlib.nullcontext())
    found = {"checkpointing": same(recomputed, plain), "trained": len(plain)}
    whole = None
    for way in ("moved", "mixed"):
        limit = 1 << 26 if whole is None else whole // 2
        engine = Offloader(
            lanes(torch.device("cpu")), Arena(Slab.anonymous, limit), minimum=1, room=Room(), grace_limit=limit
        )
        patches = Patches()
        patches.install(checkpointing_past(lambda engine=engine: engine))
        tensors = [value for value in inputs.values() if isinstance(value, torch.Tensor)]
        steps = [
            same(gradients(model, inputs, precision, engine.step("a", model.parameters, tensors)), plain)
            for _ in range(3)
        ]
        patches.remove()
        (shape,) = engine.shapes.values()
        found[way] = {
            "same": all(steps),
            "moved": engine.moved,
            "late": engine.late,
            "fetched": engine.fetched,
            "surprises": engine.surprises,
        }
        found[way]["blocks"] = {choice: shape.block_choices.count(choice) for choice in ("offload", "recompute")}
        whole = shape.mix.offloaded
    return found


def in_slots(name, kind, precision):
    """Blocks' weights come and go, in slots that are overwritten when they are left, and gradients go to a pool."""
    model, inputs = prepared(globals()[name], kind, precision)
    plain = gradients(model, inputs, precision, contextlib.nullcontext())
    stream = WeightStream(
        find_blocks([model]), lanes(torch.device("cpu"))[1], released=lambda memory: memory.fill_(255)
    )
    stream.install([model])
    pooled = PooledGradients(HostPool(1 << 30), lanes(torch.device("cpu"))[0])
    pooled.install(model.parameters())
    found = {"blocks": len(stream.blocks)}
    for way in ("plain", "checkpointed"):
        if way == "checkpointed":
            model.enable_gradient_checkpointing()
        late = stream.late
        found[way] = [same(gradients(model, inputs, precision, stream.step()), plain) for _ in range(3)]
        found[f"late {way}"] = stream.late - late
    stream.go_home()
    found["kept"], found["failed"], found["moved"] = stream.kept, stream.failed, pooled.moved
    return found


IMPOSSIBLE = {("z_image", "autocast")}
"""Its padding is of the weights' type, so that SimpleTuner itself can't run it in another."""

cases = itertools.product(FAMILIES, ("full", "lora"), ("fp32", "bf16", "autocast"))  # noqa: F821
compared = globals()[COMPARED]  # noqa: F821
possible = (case for case in cases if (case[0], case[2]) not in IMPOSSIBLE)
print("RESULT " + json.dumps({" ".join(case): compared(*case) for case in possible}))
