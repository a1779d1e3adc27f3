"""A SimpleTuner whose ``Trainer.init_hooks`` takes another argument than the one we know."""


def install(record):
    from simpletuner.helpers.training.trainer import Trainer

    original = Trainer.init_hooks

    def init_hooks(self, something_new=None):
        return original(self)

    Trainer.init_hooks = init_hooks
