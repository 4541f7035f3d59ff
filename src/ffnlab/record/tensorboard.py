"""TensorBoard event files in the run directory (an optional extra)."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from ffnlab.errors import UserError
from ffnlab.record.sinks import Sink, finite_edges


class TensorBoardSink(Sink):
    """Scalars, histograms and images under `tensorboard/` of the run directory; a resume hides the steps it
    redoes.

    Raises UserError when the package tensorboard is missing.
    """

    def __init__(self) -> None:
        if find_spec("tensorboard") is None:
            raise UserError("logger=tensorboard needs one more package: pip install 'ffnlab[tensorboard]'.")
        self._folder: Path | None = None
        self._writer: Any = None

    def start(self, info: dict[str, Any], config: dict[str, Any]) -> None:
        """Note the folder; the writer is made at the first row, whose step says where a resume goes on."""
        self._folder = Path(info["path"]) / "tensorboard"
        self._resumed = bool(info.get("resumed"))

    def log(self, row: dict[str, Any]) -> None:
        """Write the numbers of one row at its step."""
        step = int(row["step"])
        writer = self._open(step)
        for key, value in row.items():
            if key != "step" and value is not None and not isinstance(value, str):
                writer.add_scalar(key, value, step)

    def histograms(self, step: int, values: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
        """Write counts over fixed edges; the moments are those of the bins' centres."""
        for name, (counts, edges) in values.items():
            counts, edges = np.asarray(counts, np.float64), finite_edges(edges)
            centres = (edges[:-1] + edges[1:]) / 2
            self._open(step).add_histogram_raw(
                name,
                min=float(edges[0]),
                max=float(edges[-1]),
                num=float(counts.sum()),
                sum=float(counts @ centres),
                sum_squares=float(counts @ centres**2),
                bucket_limits=edges[1:].tolist(),
                bucket_counts=counts.tolist(),
                global_step=step,
            )

    def image(self, name: str, path: Path, step: int) -> None:
        """Write a PNG file as it is."""
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[attr-defined]  # generated

        image = Summary.Image(encoded_image_string=path.read_bytes())
        self._open(step)._get_file_writer().add_summary(
            Summary(value=[Summary.Value(tag=name, image=image)]), step
        )

    def finish(self, status: str, summary: dict[str, Any]) -> None:
        """Write what is buffered."""
        if self._writer:
            self._writer.close()

    def _open(self, step: int) -> Any:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), purge_step=step if self._resumed else None)
        return self._writer
