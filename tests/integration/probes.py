"""What a rank of a run is made to do or remember; ``train(probe=probe("name"))`` calls the function of that name."""

from __future__ import annotations

import builtins
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from functools import wraps
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

Record = dict[str, Any]


def around(owner: Any, name: str, watched: Callable[..., Any]) -> None:
    """Each call of the method is one of ``watched(original, self, ...)``; our seams still see its parameters."""
    original = getattr(owner, name)

    @wraps(original)
    def method(self, *args, **kwargs):
        return watched(original, self, *args, **kwargs)

    setattr(owner, name, method)


def latents_without_chance(record: Record) -> None:
    """SimpleTuner samples them from several threads, so two plain runs already differ.

    oneDNN is off: its generated code crashes in forked ranks that encode images, with and without the extension.
    """
    import torch
    from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

    torch.backends.mkldnn.enabled = False
    around(DiagonalGaussianDistribution, "sample", lambda _sample, self, generator=None: self.mode())


def own_share_alone(record: Record) -> None:
    """SimpleTuner's caching pass over what its split gives to a rank and to none before it, as if it were alone."""
    from accelerate.utils import gather_object
    from simpletuner.helpers.caching.vae import VAECache

    def process_buckets(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        own = [path for files in self.metadata_backend.aspect_ratio_bucket_indices.values() for path in files]
        before = {path for share in gather_object([own])[: self.accelerator.process_index] for path in share}
        record["share"] = [path for path in own if path not in before]
        self.local_unprocessed_files = [path for path in self.local_unprocessed_files if path in record["share"]]
        return original(self, *args, **kwargs)

    around(VAECache, "process_buckets", process_buckets)


def changed_seam(record: Record) -> None:
    """A SimpleTuner whose ``Trainer.init_hooks`` takes another argument than the one we know."""
    from simpletuner.helpers.training.trainer import Trainer

    original = Trainer.init_hooks

    def init_hooks(self, something_new=None):
        return original(self)

    Trainer.init_hooks = init_hooks


def failing_train(record: Record) -> None:
    """Training fails at its third batch, deep inside SimpleTuner."""
    from simpletuner.helpers.training.trainer import Trainer

    calls = []

    def prepare_batch(original, self, batch):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("planted failure")
        return original(self, batch)

    around(Trainer, "prepare_batch", prepare_batch)


def places(record: Record) -> None:
    """Which images each rank takes, and how many of its epoch it knows to be done once a checkpoint is loaded."""
    from simpletuner.helpers.metadata.backends.base import MetadataBackend
    from simpletuner.helpers.multiaspect.sampler import MultiAspectSampler

    record.update(taken=[], known_after_loading=[])

    def mark(original, self, paths):
        record["taken"].append([Path(path).name for path in paths])
        return original(self, paths)

    def load(original, self, state_path):
        result = original(self, state_path)
        record["known_after_loading"].append(len(self.metadata_backend.seen_images))
        return result

    around(MetadataBackend, "mark_batch_as_seen", mark)
    around(MultiAspectSampler, "load_states", load)


def prefetch(record: Record) -> None:
    """With what queue SimpleTuner's own prefetching was started, if it was."""
    from simpletuner.helpers.training import trainer

    record["queues"] = []

    def start(original, self, *args, **kwargs):
        record["queues"].append(kwargs["max_size"])
        original(self, *args, **kwargs)

    around(trainer.BatchFetcher, "__init__", start)


def runtime(record: Record) -> None:
    """What the extension looks like from inside a training process."""
    import simpletuner_gh200.seams.runtime as runtime_module

    def configure(original, self, settings, verdict=dict):
        original(self, settings, verdict)
        from simpletuner.helpers.training.state_tracker import StateTracker

        kept = StateTracker.get_raw_config() or {}
        record["settings"] = {key: [value, origin] for key, value, origin in settings.rows()}
        record["notes"] = list(settings.notes)
        record["raw"] = sorted(key for key in kept if "gh200" in key or "cache_config" in key)
        record["left_on_config"] = [key for key in vars(self.trainer.config) if "gh200" in key or key == "cache_config"]
        record["runtime_config"] = StateTracker.get_gh200_runtime_config()

    around(runtime_module.Runtime, "configure", configure)


def slow(record: Record) -> None:
    """Slow every backward pass down by GH200_TEST_SLEEP seconds."""
    from accelerate import Accelerator

    pause = float(os.environ["GH200_TEST_SLEEP"])

    def backward(original, self, loss, **named):
        time.sleep(pause)
        original(self, loss, **named)

    around(Accelerator, "backward", backward)


def slow_queues(record: Record) -> None:
    """What is known of a sample comes late through a queue of ``multiprocessing``, as on a machine that is busy."""
    feed: Callable[..., None] = Queue._feed

    def late(buffer, notempty, send_bytes, *rest):
        def send(message):
            if b"crop_coordinates" in bytes(message):
                time.sleep(0.5)
            send_bytes(message)

        feed(buffer, notempty, send, *rest)

    Queue._feed = staticmethod(late)


def breaking_images(record: Record) -> None:
    """Images break between SimpleTuner's own look at them and the staging, which goes on while training runs."""

    broken = b"no image any more"

    def stage(original, self, batch):
        for file in map(Path, map(os.fsdecode, batch.paths())):
            # Once: what is written again and again is left to the disk.
            if file.suffix == ".png" and file.read_bytes() != broken:
                file.write_bytes(broken)
        original(self, batch)

    while_staging(stage)


def killed_staging(record: Record) -> None:
    """Local rank 0 dies in the middle of staging, as by the kernel's OOM killer."""

    def stage(original, self, batch):
        original(self, batch)
        os.kill(os.getpid(), signal.SIGKILL)

    while_staging(stage)


def while_staging(stage: Callable[..., None]) -> None:
    if os.environ.get("RANK", "0") == "0":
        from simpletuner_gh200.held.stager import BatchStager

        around(BatchStager, "stage", stage)


def reads(record: Record) -> None:
    """Which files of the dataset were read from disk."""
    record["opened"] = []
    original = builtins.open

    def counting(file, mode="r", *rest, **more):
        if isinstance(file, str) and "/images/" in file and file.endswith((".png", ".txt")) and "r" in mode:
            record["opened"].append(file.rsplit("/", 1)[1])
        return original(file, mode, *rest, **more)

    builtins.open = counting


def two_nodes(record: Record) -> None:
    """Makes two ranks believe that they are alone on a node each."""
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", GROUP_RANK=os.environ["RANK"])


def trackers(record: Record) -> None:
    """Remember what goes to the trackers."""
    from accelerate import Accelerator

    record.update(logged=[], logged_names=[])

    def log(original, self, values, step=None, log_kwargs=None):
        record["logged"].append(step)
        record["logged_names"] = sorted(set(record["logged_names"]) | set(values))
        return original(self, values, step=step, log_kwargs=log_kwargs or {})

    around(Accelerator, "log", log)


def preempted(record: Record) -> None:
    """Plays the launcher of this rank, and sends the last rank a signal in the middle of a window."""
    from accelerate import Accelerator

    from simpletuner_gh200.seams.lifeline import RELEASE, Lifeline

    def hear() -> None:
        """Till the rank's last word, after which it waits to be let go."""
        heard = b""
        while b'"summary"' not in heard:
            heard += theirs.recv(1 << 16)
        os.kill(os.getpid(), RELEASE)

    ours, theirs = socket.socketpair()
    record["launcher"] = theirs  # were it closed, this rank would end
    threading.Thread(target=hear, daemon=True).start()
    Lifeline.from_environment = classmethod(lambda cls, environment: cls(ours))  # the line is real, its end is here
    last = os.environ.get("RANK", "0") == str(int(os.environ.get("WORLD_SIZE", "1")) - 1)

    def backward(original, self, loss, **named):
        original(self, loss, **named)
        if last and len(record["losses"]) == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    around(Accelerator, "backward", backward)


def out_of_memory(record: Record, times: int = 4) -> None:
    """The first ``times`` attempts at a micro-batch end in torch's OutOfMemoryError: in turns in the forward pass, and
    when backward has left its gradients."""
    import torch
    from accelerate import Accelerator
    from simpletuner.helpers.training.trainer import Trainer

    left = [times]

    def full() -> None:
        left[0] -= 1
        raise torch.OutOfMemoryError(f"planted: {left[0]} to come\nand a table")

    def model_predict(original, self, *args, **kwargs):
        prediction = original(self, *args, **kwargs)
        if left[0] > 0 and left[0] % 2:
            full()
        return prediction

    def backward(original, self, loss, **kwargs):
        result = original(self, loss, **kwargs)
        if left[0] > 0:
            full()
        return result

    around(Trainer, "model_predict", model_predict)
    around(Accelerator, "backward", backward)


def never_enough_memory(record: Record) -> None:
    out_of_memory(record, times=99)
