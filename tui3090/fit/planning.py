"""Which cell is measured next, which are not worth running, and which is the best in the end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tui3090.fit.cells import Cell, Column, Look, all_columns
from tui3090.fit.prediction import Point, predict

MARGIN = 0.1
"""Share of the memory that the recommended combination leaves free: longer samples, evaluation and pieces need it."""
SURELY_TOO_BIG = 1.15
"""A cell that is predicted to take more than this times the memory is not run; predictions are within 10 %."""
LONGEST_STEP_S = 30.0
"""A cell whose step would take longer is not run."""
MOST_SAMPLES = 65_536
"""Where it is not known how many samples there are: no batch is bigger."""
WORTH = 1.1
"""Samples a second over those of half the batch: below it a CPU, which a batch does not fill, gets no bigger one."""


class Fit:
    """The table while it grows, row by row. Give every cell that `next` names to `add`."""

    def __init__(self, look: Look, start: int) -> None:
        self.look = look
        self.columns = [column for column in all_columns(look.amp) if column.name not in look.refused]
        self.cells: dict[tuple[int, Column], Cell] = {}
        self.rows: list[int] = []
        self._closed: dict[Column, tuple[str, bool]] = {}
        """Columns in which bigger batches are not run: why, and whether because they don't fit."""
        self._first = look.batch_size if look.fixed else min(start, look.rows or start)
        self._batches = self._doubling(self._first)

    def _doubling(self, batch: int) -> Iterator[int]:
        """The rows from this batch on. A batch holds no more samples than there are."""
        yield batch
        most = MOST_SAMPLES if self.look.rows is None else self.look.rows
        while not self.look.fixed and 2 * batch <= most:
            batch *= 2
            yield batch

    def next(self) -> tuple[int, Column] | None:
        """The next cell to run; None: nothing more fits. Cells that are not worth running are filled in."""
        while True:
            for column in self.columns if self.rows else ():
                batch = self.rows[-1]
                if (batch, column) in self.cells:
                    continue
                predicted = self.predicted(batch, column)
                if column not in self._closed and (why := self._not_worth(batch, column, predicted)) is not None:
                    self._closed[column] = why
                if column not in self._closed:
                    return batch, column
                sentence, too_big = self._closed[column]
                self._put(Cell(batch, column, "oom" if too_big else "not run", predicted, sentence=sentence))
            if len(self._closed) == len(self.columns) or (row := next(self._batches, None)) is None:
                return None
            self.rows.append(row)

    def _not_worth(self, batch: int, column: Column, predicted: int | None) -> tuple[str, bool] | None:
        room = self.look.room
        if predicted is not None and predicted > SURELY_TOO_BIG * room:
            return f"predicted to take {gib(predicted)} GiB of {gib(room)}", True
        before = self.cells.get((batch // 2, column))
        if before is None or before.step_s is None or before.samples_s is None:
            return None
        if 2 * before.step_s > LONGEST_STEP_S:
            return f"a step would take longer than {LONGEST_STEP_S:.0f} s", False
        earlier = None if self.look.on_card else self.cells.get((batch // 4, column))
        if earlier is not None and before.samples_s < WORTH * (earlier.samples_s or 0.0):
            return f"batch {before.batch} was hardly faster than {earlier.batch}", False
        return None

    def predicted(self, batch: int, column: Column) -> int | None:
        """Bytes that a cell will take: from the first look, or where it measured nothing from the column's cells."""
        points = self.look.points.get(column.eager.name, [])
        if len(points) >= 2:
            return predict(points, batch * self.look.elements, gradients_kept=column.technique == "graph")
        measured = [cell for (_, of), cell in self.cells.items() if of == column and cell.memory is not None]
        return predict([Point(cell.batch, (cell.memory or 0,)) for cell in measured], batch)

    def fits_up_to(self, column: Column) -> int:
        """The biggest of the table's batches that is predicted to fit on the card; 0: none, or nothing is known."""
        fitting = 0
        for batch in self._doubling(self._first):
            predicted = self.predicted(batch, column)
            if predicted is None or predicted > self.look.room:
                break
            fitting = batch
        return fitting

    def add(self, cell: Cell) -> None:
        """A cell that was run."""
        self._put(cell)
        before = self.cells.get((cell.batch // 2, cell.column))
        if cell.status == "oom":
            self._closed[cell.column] = f"batch {cell.batch} did not fit", True
        elif cell.status == "died":  # where the machine's memory ran out, a bigger batch is no better
            self._closed[cell.column] = f"the process of batch {cell.batch} died", False
        elif cell.status == "failed" and before is not None and before.status == "failed":  # one may be BatchNorm's
            self._closed[cell.column] = f"batches {before.batch} and {cell.batch} failed", False

    def _put(self, cell: Cell) -> None:
        self.cells[cell.batch, cell.column] = cell

    def cells_left(self) -> int:
        """How many cells will still be run, as far as can be told now: on the CPU those of this row."""
        left, row = 0, self.rows[-1] if self.rows else self._first
        for column in self.columns:
            if column in self._closed:
                continue
            for batch in self._doubling(row):
                predicted = self.predicted(batch, column)
                if predicted is not None and predicted > SURELY_TOO_BIG * self.look.room:
                    break
                left += (batch, column) not in self.cells
                if predicted is None or not self.look.on_card:
                    break
        return left

    # what the table says

    def speed(self, cell: Cell) -> tuple[float, int] | None:
        """Samples a second over those of plain FP32 at the same batch, or at the biggest that was measured; which."""
        plain = [c for (_, column), c in self.cells.items() if column == Column() and c.samples_s is not None]
        if cell.samples_s is None or not plain:
            return None
        against = next((c for c in plain if c.batch == cell.batch), max(plain, key=lambda c: c.batch))
        assert against.samples_s is not None
        return cell.samples_s / against.samples_s, against.batch

    def best(self) -> Cell | None:
        """The fastest that leaves the margin free; None: there is none."""
        measured = [c for c in self.cells.values() if c.samples_s is not None and c.needs is not None]
        fitting = [c for c in measured if (c.needs or 0) <= (1 - MARGIN) * self.look.room]
        return max(fitting, key=lambda c: c.samples_s or 0.0, default=None)

    def deviation(self) -> tuple[float, int] | None:
        """How far predictions were off at the most, as a share of what was measured, and over how many cells."""
        both = [(c.predicted, c.memory) for c in self.cells.values() if c.predicted and c.memory]
        return (max(abs(p / m - 1) for p, m in both), len(both)) if both else None

    def savings(self) -> list[tuple[Column, int, float]]:
        """What checkpointing saves of the peak, by precision, at the biggest batch that fits without it."""
        found = []
        for column in self.columns:
            if column.technique:
                continue
            with_it = replace(column, technique="checkpointing")
            for batch in reversed(self.rows):
                a, b = (self.cells.get((batch, c)) for c in (column, with_it))
                if a is not None and b is not None and a.memory and b.memory:
                    found.append((column, batch, 1 - b.memory / a.memory))
                    break
        return found


def gib(amount: float) -> str:
    """Bytes in GiB."""
    return f"{amount / 2**30:.2f}"
