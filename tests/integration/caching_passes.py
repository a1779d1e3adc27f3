"""Beside an imported SimpleTuner: the same caching pass stock and with workers, and what differs in what they leave."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from simpletuner_gh200.bench.caching_simpletuner import CachingBench, Images, free
from simpletuner_gh200.caching.workers import WorkerPool
from simpletuner_gh200.seams.features.caching.feature import TARGET

SIZES = {"read_batch_size": 5, "process_queue_size": 3, "write_batch_size": 4}
AREA = {"resolution": 0.02, "resolution_type": "area"}
SQUARE = {"resolution": 128, "resolution_type": "pixel"}
BUCKETS = {"crop_aspect_buckets": [0.5, 1.0, 1.5], **AREA}


def draw(folder: Path, count: int = 17) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        width, height = ((200, 200), (320, 180), (150, 260), (128, 128))[number % 4]
        picture(number, width, height).save(folder / f"{number:02}.png")


def picture(seed: int, width: int, height: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 255, (height // 4, width // 4, 3), np.uint8)
    return Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)


def draw_odd(folder: Path) -> None:
    """What pictures are like: turned, transparent, in other colours, with more bits, moving."""
    folder.mkdir(parents=True, exist_ok=True)
    turned = Image.Exif()
    for orientation in (3, 6):
        turned[0x0112] = orientation
        picture(orientation, 300, 200).save(folder / f"turned{orientation}.jpg", exif=turned)
    plain = picture(20, 220, 180)
    clear = plain.copy()
    clear.putalpha(Image.linear_gradient("L").resize(clear.size))
    clear.save(folder / "alpha.png")
    clear.save(folder / "clear.webp", lossless=True)
    plain.convert("CMYK").save(folder / "cmyk.jpg")
    plain.convert("L").save(folder / "grey.jpg")
    clear.convert("LA").save(folder / "grey_alpha.png")
    plain.quantize(16).save(folder / "palette.png", transparency=3)
    plain.convert("1").save(folder / "bits.png")
    deep = np.random.default_rng(5).integers(0, 65535, (180, 220), np.uint16)
    Image.fromarray(deep).save(folder / "deep.png")
    frames = [picture(seed, 160, 160) for seed in range(3)]
    for ending in ("gif", "webp"):
        frames[0].save(folder / f"moving_{ending}.{ending}", save_all=True, append_images=frames[1:])
    picture(9, 2000, 40).save(folder / "long.png")
    for number in range(6):
        picture(30 + number, 240, 170).save(folder / f"broken{number}.jpg", quality=95)


def draw_videos(folder: Path) -> None:
    import imageio

    folder.mkdir(parents=True, exist_ok=True)
    for number, (width, height) in enumerate(((192, 192), (256, 160), (160, 256)) * 2):
        frames = [np.asarray(picture(10 * number + frame, width, height)) for frame in range(5)]
        imageio.mimwrite(folder / f"{number}.mp4", frames, fps=25)


def damage(folder: Path) -> None:
    """After the scan: cut short, emptied, replaced, gone."""
    whole = (folder / "broken0.jpg").read_bytes()
    (folder / "broken0.jpg").write_bytes(whole[: len(whole) // 2])
    (folder / "broken1.jpg").write_bytes(b"")
    (folder / "broken2.jpg").write_bytes(b"no picture at all")
    (folder / "broken3.jpg").unlink()


class HalfStaged:
    """Every other file is in memory, as a data set's are where it is staged; stock does not ask."""

    def view(self, path: str) -> bytes | None:
        with suppress(OSError):
            return Path(path).read_bytes() if sum(path.encode()) % 2 else None
        return None


class Comparison:
    """One case: its pictures are scanned once, and put back before each pass."""

    def __init__(self, folder: Path, sets: list[Images], damage: Callable[[], None] | None = None) -> None:
        self.folder, self.sets = folder, sets
        self._state, self._kept = folder / "state", folder / "kept"
        scanned = CachingBench(self._state, sets)
        self.pictures = sum(len(cache.local_unprocessed_files) for cache in scanned.caches.values())
        if damage is not None:
            damage()
        for place in (self._state, *(images.folder for images in sets)):
            shutil.copytree(place, self._kept / place.name)

    def outcome(
        self, pool: WorkerPool | None, *, fresh: bool = True, during: Any = None, **sizes: Any
    ) -> dict[str, Any]:
        for place in (self._state, *(images.folder for images in self.sets)) if fresh else ():
            shutil.rmtree(place)
            shutil.copytree(self._kept / place.name, place)
        seed_everything()
        bench = CachingBench(self._state, self.sets, noisy, **{**SIZES, **sizes.pop("sizes", {})})
        if during is not None:
            threading.Thread(target=during, args=(bench,), daemon=True).start()
        for cache in bench.caches.values():
            cache.image_data_backend.staged = HalfStaged()
        bench.run(pool, **sizes)
        self.last = bench
        return outcome_of(bench)


def noisy(pixels: Any) -> Any:
    """A VAE that draws from a distribution, in the order of its batches."""
    import torch

    means = torch.nn.functional.avg_pool2d(pixels.float().flatten(0, -4), 8).unflatten(0, pixels.shape[:-3])
    return means + torch.randn_like(means)


def outcome_of(bench: CachingBench) -> dict[str, Any]:
    """What a pass has left: every tensor, all metadata, which files are there, where the random numbers are."""
    import torch

    found: dict[str, Any] = {"batches": list(map(list, bench.batches))}
    for name, cache in bench.caches.items():
        files = sorted(Path(cache.cache_dir).rglob("*.pt"))
        found[f"{name} latents"] = {str(path.relative_to(cache.cache_dir)): digest(cache, path) for path in files}
        metadata = cache.metadata_backend
        found[f"{name} buckets"] = json.loads(json.dumps(metadata.aspect_ratio_bucket_indices, default=repr))
        found[f"{name} metadata"] = {path: repr(entry) for path, entry in sorted(metadata.image_metadata.items())}
        found[f"{name} files"] = sorted(path.name for path in Path(cache.instance_data_dir).iterdir())
    numbers = repr(random.getstate()).encode() + torch.get_rng_state().numpy().tobytes()
    found["random numbers"] = hashlib.sha256(numbers).hexdigest()
    return found


def digest(cache: Any, path: Path) -> str:
    tensor = cache.cache_data_backend.torch_load(str(path))
    return f"{tuple(tensor.shape)} {tensor.dtype} {hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()}"


def seed_everything() -> None:
    import torch

    random.seed(7)
    torch.manual_seed(7)


def differences(stock: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    return {key: [str(stock[key])[:900], str(ours[key])[:900]] for key in stock if stock[key] != ours[key]}


def cases(folder: Path) -> dict[str, tuple[list[Images], Callable[[], None] | None, dict[str, Any]]]:
    pictures, odd, conditions, videos = (folder / name for name in ("pictures", "odd", "conditions", "videos"))
    draw(pictures)
    draw_videos(videos)
    draw_odd(odd)
    draw(conditions)

    def of(**config: Any) -> list[Images]:
        return [Images(pictures, config)]

    follows = Images(conditions, SQUARE, name="follows", kind="conditioning", scanned=False)
    batches = {f"batches of {size}": (of(**SQUARE), None, {"vae_batch_size": size}) for size in range(1, 9)}
    return {
        **batches,
        "preserved": (of(crop=False, **AREA), None, {"vae_batch_size": 2}),
        "preserved aspect": (of(crop_aspect="preserve", crop_style="center", **AREA), None, {}),
        "closest aspect": (of(crop_aspect="closest", crop_style="corner", **BUCKETS), None, {}),
        "random aspect": (of(crop_aspect="random", crop_style="centre", **BUCKETS), None, {}),
        "downsampled first": (of(maximum_image_size=150, target_downsample_size=140, **SQUARE), None, {}),
        "faces": (of(crop_style="face", **SQUARE), None, {}),
        "moving": ([Images(videos, {**SQUARE, "video": {"num_frames": 5}}, kind="video")], None, {"vae_batch_size": 2}),
        "odd files": ([Images(odd, SQUARE)], lambda: damage(odd), {"vae_batch_size": 5}),
        "odd files, deleted": ([Images(odd, SQUARE)], lambda: damage(odd), {"delete_problematic_images": True}),
        "conditioning": ([Images(pictures, SQUARE, conditioning=("follows",)), follows], None, {}),
        "conditioning, preserved": (
            [Images(pictures, {"crop": False, **AREA}, conditioning=("follows",)), follows],
            None,
            {"vae_batch_size": 3},
        ),
    }


def compare(folder: str, names: list[str]) -> None:
    """One line of JSON for each case: how many pictures, how many files they became, what differs."""
    found = cases(Path(folder))
    pool = WorkerPool(TARGET, 2)
    for name in names or list(found):
        sets, spoil, sizes = found[name]
        case = Comparison(Path(folder, name), sets, spoil)
        stock, ours = (case.outcome(workers, sizes=sizes) for workers in (None, pool))
        written = sum(len(ours[f"{images.name} latents"]) for images in sets)
        say(case=name, pictures=case.pictures, written=written, differences=differences(stock, ours))
        shutil.rmtree(folder, ignore_errors=True)
        found = cases(Path(folder))
    pool.close()


def loose(folder: str) -> None:
    """Random crops of pictures: SimpleTuner draws them from numbers that no seed repeats, so sizes are compared."""
    pictures = Path(folder, "pictures")
    draw(pictures)
    case = Comparison(Path(folder, "case"), [Images(pictures, {"crop_style": "random", **SQUARE})])
    with closing(WorkerPool(TARGET, 2)) as pool:
        stock, ours = (case.outcome(workers) for workers in (None, pool))
    for found in (stock, ours):
        latents = found.pop("bench latents")
        found["shapes"] = {path: digest.rpartition(" ")[0] for path, digest in latents.items()}
    say(differences=differences(stock, ours), written=len(ours["shapes"]))


def disturbed(folder: str) -> None:
    """Workers and their server are killed, stopped for good, and short of memory; nothing of that is to be seen."""
    pictures = Path(folder, "pictures")
    draw(pictures, 60)
    Image.new("L", (6000, 6000)).save(pictures / "bomb.png")
    case = Comparison(Path(folder, "case"), [Images(pictures, SQUARE)])
    stock = case.outcome(None)
    with closing(WorkerPool(TARGET, 2)) as pool:
        for signals in ([signal.SIGKILL] * 3, [signal.SIGSTOP], []):
            ours = case.outcome(pool, during=partial(send_all, pool, signals), seconds=5.0, ceiling=8 << 20)
            say(differences=differences(stock, ours), most=case.last.last.most)


def send_all(pool: WorkerPool, signals: list[int], bench: CachingBench) -> None:
    """To workers, one at a time, then SIGKILL to their server."""
    server = children(os.getpid())
    for number in signals:
        for worker in children(server[0])[:1] if server else []:
            with suppress(ProcessLookupError):
                os.kill(worker, number)
        time.sleep(0.5)
    for pid in server if not signals else []:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def children(of: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) == of and fields[0] not in "ZX":
                    found.append(int(entry.name))
    return found


def interrupted(folder: str) -> None:
    """Killed in the middle, twice, and gone on with; one picture's file never ends."""
    pictures = Path(folder, "pictures")
    draw(pictures, 24)
    case = Comparison(Path(folder, "case"), [Images(pictures, SQUARE)])
    replace_by_fifo(pictures / "05.png")
    for batches in (2, 3):
        child = os.fork()
        if child == 0:
            bench = CachingBench(case.folder / "state", case.sets, partial(dying, [batches]), **SIZES)
            bench.run(WorkerPool(TARGET, 2), seconds=2.0)
            os._exit(1)
        _pid, status = os.waitpid(child, 0)
        say(killed=os.WIFSIGNALED(status), written=len(list((case.folder / "state").rglob("*.pt"))))
    bench = CachingBench(case.folder / "state", case.sets, free, **SIZES)
    with closing(WorkerPool(TARGET, 2)) as pool:
        bench.run(pool, seconds=2.0)
    outcome = outcome_of(bench)
    say(
        written=len(outcome["bench latents"]),
        left_out=not any("05.png" in path for paths in outcome["bench buckets"].values() for path in paths),
        there=(pictures / "05.png").is_fifo(),
    )


def replace_by_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def dying(left: list[int], pixels: Any) -> Any:
    left[0] -= 1
    if left[0] < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return free(pixels)


def say(**words: Any) -> None:
    os.write(1, f"\n{json.dumps(words)}\n".encode())  # progress bars end in no line
