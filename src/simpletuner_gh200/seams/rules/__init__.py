"""What SimpleTuner itself says of a configuration before it has weights (``__main__`` has the question and answer).

``judging`` takes its exceptions for an answer, ``configuration`` asks its trainer, ``datasets`` its factory.
"""
