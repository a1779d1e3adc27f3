"""Training fails at its third batch, deep inside SimpleTuner."""


def install(record):
    from simpletuner.helpers.training.trainer import Trainer

    original = Trainer.prepare_batch
    calls = []

    def prepare_batch(self, batch):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("planted failure")
        return original(self, batch)

    Trainer.prepare_batch = prepare_batch
