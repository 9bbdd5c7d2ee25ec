"""RowKernel: statistics of each row, then a pass over it; rows whole, or in chunks where long.

Softmax and the normalisations are subclasses that say what their statistics are.
"""

from __future__ import annotations

from bedstone.backends.cpu.rows import LEAST_UNIT, PerRow, Position, Rows
from bedstone.backends.cpu.tasks import each_unit, unravel
from bedstone.backends.cpu.values import Float, IntLike


class RowKernel:
    """A kernel over rows: statistics, then a pass that writes.

    Subclasses say how many numbers a row has (`numbers`), how to gather them (`statistics`), to
    merge those of two chunks (`merge`), to finish them and give some out (`conclude`), and to
    write (`write`). `buffered`: an uncut unit may use `rows.buffer` between the passes.
    """

    numbers = 1
    kept = 1
    writes = True
    buffered = False

    def __init__(self, rows: Rows) -> None:
        self.rows, self.k = rows, rows.k

    def prepare(self) -> None:
        """What every unit makes first: its Outputs."""

    def statistics(self, chunk: IntLike | None) -> list[PerRow]:
        """Numbers gathered over the unit, or a chunk of it."""
        raise NotImplementedError

    def merge(self, a: list[Float], b: list[Float]) -> list[Float]:
        """The numbers of two chunks together."""
        raise NotImplementedError

    def conclude(self, numbers: list[PerRow]) -> list[PerRow]:
        """What `write` needs: `kept` numbers."""
        return numbers

    def write(self, numbers: list[PerRow], chunk: IntLike | None) -> None:
        """The pass over the elements; nothing by default."""

    def emit(self) -> None:
        """The parallel phases."""
        rows = self.rows
        if rows.chunks == 1:
            self._emit_whole()
        else:
            self._emit_chunks()

    def _scratch(self, buffer: bool) -> int:
        return self.rows.scratch_bytes(buffer)

    @property
    def buffer(self) -> IntLike:
        """The buffer with a spot for every element of the unit (uncut units only)."""
        return self.rows.scratch + self._scratch(False)

    def _emit_whole(self) -> None:
        k, rows = self.k, self.rows
        elements = max(1, rows.length * rows.block)
        per_unit = max(1, LEAST_UNIT // elements)
        units = -(-rows.units // per_unit)
        scratch = self._scratch(self.buffered)
        with each_unit(k, rows.call.threads, units, scratch, rows.large) as (group, memory):
            self.prepare()
            first = group * per_unit
            last = k.min(first + per_unit, rows.units)
            with k.loop(first, last, at_least_once=True) as unit:
                rows.enter(unit, memory)
                numbers = self.conclude(self.statistics(None))
                if self.writes:
                    self.write(numbers, None)

    def _emit_chunks(self) -> None:
        k, rows = self.k, self.rows
        threads, chunks, scratch = rows.call.threads, rows.chunks, self._scratch(False)
        partial = rows.saved_bytes(self.numbers)
        final = rows.saved_bytes(self.kept)
        partials = k.scratch(rows.units * (chunks * partial + final))
        finals = partials + rows.units * chunks * partial
        with each_unit(k, threads, rows.units * chunks, scratch, rows.large) as (number, memory):
            unit, chunk = unravel(number, (rows.units, chunks))
            rows.enter(unit, memory)
            rows.save(self.statistics(chunk), partials + number * partial)
        with each_unit(k, threads, rows.units, scratch) as (unit, memory):
            self.prepare()
            rows.enter(unit, memory)
            merged = self._merged(partials + unit * (chunks * partial), partial)
            rows.save(self.conclude(merged), finals + unit * final)
        if not self.writes:
            return
        with each_unit(k, threads, rows.units * chunks, scratch, rows.large) as (number, memory):
            self.prepare()
            unit, chunk = unravel(number, (rows.units, chunks))
            rows.enter(unit, memory)
            self.write(rows.saved(finals + unit * final, self.kept), chunk)

    def _merged(self, address: IntLike, partial: int) -> list[PerRow]:
        """The numbers of all chunks of this unit, merged in order."""
        k, rows = self.k, self.rows
        slots = [rows.new_slot() for _ in range(self.numbers)]
        found: list[PerRow] = []

        def body(position: Position) -> None:
            def read(chunk: IntLike, i: int) -> Float:
                place = address + chunk * partial + i * rows.block * rows.width
                if rows.along:
                    return k.splat(k.load(place, rows.compute), rows.lanes)
                return k.load(place + position.lane * rows.width, rows.compute, rows.lanes)

            running = [k.variable(read(0, i)) for i in range(self.numbers)]
            with k.loop(1, rows.chunks) as chunk:
                new = [read(chunk, i) for i in range(self.numbers)]
                for variable, value in zip(running, self.merge([r.value for r in running], new)):
                    variable.set(value)
            for slot, variable in zip(slots, running):
                if rows.along:
                    found.append(PerRow(rows, variable.value))
                else:
                    k.store(variable.value, rows.place(slot, position.lane), rows.compute)

        rows.each_column(body)
        return found if rows.along else [PerRow(rows, slot=slot) for slot in slots]
