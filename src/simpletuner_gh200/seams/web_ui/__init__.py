"""What SimpleTuner's Web UI shows of ours: fields, the dataset card, the panel. Seams: ``points/web_ui*.py``."""
