"""Figures as files: bytes that depend on the record alone, written whole or not at all."""

import io
import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg

from ffnlab import foreign
from ffnlab.analysis.figures import Drawing, Missing, Options, entries
from ffnlab.analysis.runs import Run, reading
from ffnlab.analysis.style import as_file, style
from ffnlab.record.files import make_folder, write_atomic

FORMATS = ("png", "svg", "pdf", "gif")
_FRAME_MS, _LAST_MS, _GIF_DPI = 100, 2000, 100


def draw(
    run: Run, names: Iterable[str], options: Options, folder: Path, kind: str | None = None
) -> tuple[list[Path], dict[str, Missing]]:
    """Draws figures into `folder`: their files, and by name what the run lacks for the others.

    Without a `kind` of FORMATS a moving picture is a GIF, the others are PNG.
    """
    paths, missing = [], {}
    for name in names:
        try:
            with reading(run):
                drawing = entries()[name].draw(run, options)
        except Missing as error:
            missing[name] = error
        else:
            paths.append(write(drawing, name, folder, kind))
    return paths, missing


def write(drawing: Drawing, name: str, folder: Path, kind: str | None = None) -> Path:
    """One figure as a file, its caption in captions.json beside it; the picture is then of no more use."""
    kind = kind or ("gif" if drawing.frames else "png")
    path, captions = folder / f"{name}.{kind}", folder / "captions.json"
    make_folder(folder)
    write_atomic(path, render(drawing, name, kind))
    drawing.picture.clear()
    known = {}
    with suppress(OSError, ValueError):  # there is none yet, or one that is not ours
        known = dict(foreign.read_json(captions))
    text = json.dumps(known | {name: drawing.caption}, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    write_atomic(captions, text)
    return path


def render(drawing: Drawing, name: str, kind: str, dpi: float | None = None) -> bytes:
    """A figure as the content of a file of one of FORMATS, with its caption as the description and no date.

    A moving picture shows its last frame where the format cannot move. `dpi`: other than that of the style.
    """
    if kind == "gif":
        return _gif(drawing)
    about = {"Title": name, "Subject" if kind == "pdf" else "Description": drawing.caption}
    # What matplotlib would add by itself: its version, the time.
    extra = {"png": ("Software",), "svg": ("Date", "Creator"), "pdf": ("CreationDate", "Creator", "Producer")}
    return as_file(drawing.picture, kind, dpi, **about, **dict.fromkeys(extra[kind]))


def _gif(drawing: Drawing) -> bytes:
    from PIL import Image

    picture, frames = drawing.picture, []
    with style():
        picture.set_dpi(_GIF_DPI)
        canvas = FigureCanvasAgg(picture)
        for show in drawing.frames or (lambda: None,):
            show()
            canvas.draw()
            picture.set_layout_engine("none")  # the panels stay where the first frame put them
            image = Image.frombytes("RGBA", canvas.get_width_height(), bytes(canvas.buffer_rgba()))
            frames.append(image.convert("RGB").quantize(128, dither=Image.Dither.NONE))
    buffer, times = io.BytesIO(), [_FRAME_MS] * (len(frames) - 1) + [_LAST_MS]
    first, rest = frames[0], frames[1:]
    moving = {"save_all": True, "append_images": rest, "duration": times, "loop": 0} if rest else {}
    first.save(buffer, format="GIF", comment=drawing.caption.encode(errors="replace")[:255], **moving)
    return buffer.getvalue()
