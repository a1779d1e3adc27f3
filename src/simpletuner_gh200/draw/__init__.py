"""Pictures and pages: line plots and bars as SVG, HTML without a script. Knows nothing of what it draws."""
