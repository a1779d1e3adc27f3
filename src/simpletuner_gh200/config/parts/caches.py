"""``cache_config``: which of SimpleTuner's caches live in slabs, and with what budgets."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from simpletuner_gh200.config.part import Part, PartModel

CacheType = Literal["unified_memory", "standard"]


class CacheSettings(PartModel):
    vae_cache_type: CacheType = Field(default="standard", description="VAE latents.")
    text_cache_type: CacheType = Field(default="standard", description="Text embeds.")
    image_embed_cache_type: CacheType | None = Field(default=None, description="Image embeds; unset: as text.")
    audio_cache_type: CacheType | None = Field(default=None, description="Audio latents; unset: as vae.")
    distillation_cache_type: CacheType = Field(default="standard", description="Distillation caches.")
    cache_dir: str | None = Field(
        default=None, min_length=1, description="Folder of the packs; unset: <output_dir>/gh200/cache."
    )
    persistent_cache: bool = Field(default=True, description="Write and load packs; false: memory only.")
    memory_limit_gb: float | None = Field(
        default=None, gt=0, strict=False, description="Host budget in GiB; unset: from MemAvailable and the cgroup."
    )
    hbm_limit_gb: float | None = Field(
        default=None, ge=0, strict=False, description="HBM budget in GiB; unset: from free HBM less headroom."
    )
    slab: Literal["auto", "registered", "managed", "host"] = Field(
        default="auto", description="How slabs are allocated; an explicit choice is obeyed or refused."
    )
    fill: Literal["start", "lazy"] = Field(default="start", description="Fill at start-up or on first use.")

    def served(self) -> dict[str, bool]:
        """Kind of cache -> whether we serve it, with the defaults that follow another key resolved."""
        audio = self.audio_cache_type or self.vae_cache_type
        image = self.image_embed_cache_type or self.text_cache_type
        kinds = {
            "vae": self.vae_cache_type,
            "text": self.text_cache_type,
            "image_embed": image,
            "audio": audio,
            "distillation": self.distillation_cache_type,
        }
        return {kind: value == "unified_memory" for kind, value in kinds.items()}


PART = Part(block="cache_config", feature="caches", model=CacheSettings, landed=True)
