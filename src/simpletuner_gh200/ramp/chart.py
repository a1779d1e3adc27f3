"""The schedule as a picture: characters for a terminal, SVG for a document."""

from __future__ import annotations

from html import escape

from simpletuner_gh200.ramp.report import Report

EIGHTHS = " ▁▂▃▄▅▆▇█"

Point = tuple[float, float]


def stairs(report: Report) -> list[Point]:
    """Corners of the line (optimizer step, effective batch), from the first step to the last."""
    points: list[Point] = []
    for window in report.changes:
        if points:
            points.append((window.step, points[-1][1]))
        points.append((window.step, window.effective))
    points.append((report.steps, points[-1][1]))
    return points


def ceiling(report: Report) -> int:
    return max(window.effective for window in report.changes)


def in_characters(report: Report, *, width: int = 60, height: int = 10) -> list[str]:
    """Lines of block characters with a scale at the left and the optimizer steps below."""
    top = ceiling(report)
    columns = [report.ramp.window(column * report.steps // width).effective for column in range(width)]
    levels = [max(1, round(value * height * 8 / top)) for value in columns]
    margin = len(str(top))
    lines = []
    for row in range(height, 0, -1):
        label = str(top) if row == height else ""
        cells = "".join(EIGHTHS[min(8, max(0, level - (row - 1) * 8))] for level in levels)
        lines.append(f"{label:>{margin}} ┤{cells}".rstrip())
    lines.append(f"{0:>{margin}} ┼{'─' * width}")
    lines.append(f"{'':>{margin}}  0{report.steps:>{width - 1}}")
    return lines


WIDTH, HEIGHT = 720, 360
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 48, 48


def to_pixels(report: Report) -> list[Point]:
    """The stairs in picture coordinates, y downwards."""
    across, down = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    top = ceiling(report)
    return [(LEFT + x / report.steps * across, HEIGHT - BOTTOM - y / top * down) for x, y in stairs(report)]


def as_svg(report: Report) -> str:
    """A whole SVG document; needs nothing to be drawn but a viewer."""
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in to_pixels(report))
    floor = HEIGHT - BOTTOM
    title = (
        f"effective batch {report.changes[0].effective} to {report.changes[-1].effective}, {report.ramp.curve}, "
        f"{report.total_samples} samples in {report.steps} optimizer steps"
    )
    area = f"{LEFT},{floor} {line} {WIDTH - RIGHT},{floor}"
    labels = [
        _label(LEFT - 8, TOP + 4, str(ceiling(report)), "end"),
        _label(LEFT - 8, floor + 4, "0", "end"),
        _label(LEFT, floor + 20, "0", "middle"),
        _label(WIDTH - RIGHT, floor + 20, str(report.steps), "end"),
        _label((LEFT + WIDTH - RIGHT) // 2, floor + 36, "optimizer step", "middle"),
        _label(LEFT, 24, title, "start"),
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
            f"<title>{escape(title)}</title>",
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
            f'<polygon points="{area}" fill="#76b900" fill-opacity="0.25"/>',
            f'<polyline points="{line}" fill="none" stroke="#4a7600" stroke-width="2"/>',
            f'<path d="M{LEFT} {TOP}V{floor}H{WIDTH - RIGHT}" fill="none" stroke="#444444"/>',
            *labels,
            "</svg>",
            "",
        ]
    )


def _label(x: float, y: float, text: str, anchor: str) -> str:
    style = f'font-family="sans-serif" font-size="13" fill="#222222" text-anchor="{anchor}"'
    return f'<text x="{x}" y="{y}" {style}>{escape(text)}</text>'
