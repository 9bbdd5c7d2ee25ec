"""What kernels share that bring their filter into another form before they use it.

Such a kernel has two halves: it packs (or transforms) the filter, and it multiplies. One body emits
both, for two modules: the plain one has an entry that does both in each call, part by part in
memory that the parts share; the prepared one has an entry for each half, and all parts in memory
that the caller keeps. Both do the same operations in the same order: results are the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

from bedstone.backends.cpu.builder import Call, KernelBuilder
from bedstone.backends.cpu.kernel import ENTRY, PACK
from bedstone.backends.cpu.values import IntLike
from bedstone.spec.convolution import ConvolutionProblem


@dataclass(frozen=True)
class Operands:
    """Addresses by role: the tensor that is convolved (x or dy), the filter, and the result (y or
    dx). What an entry does not have is 0."""

    image: IntLike = 0
    filter: IntLike = 0
    bias: IntLike = 0
    out: IntLike = 0


@dataclass(frozen=True)
class Packed:
    """The packed filter of an entry: where it lies, which halves the entry does, and whether each
    part has its own memory."""

    address: IntLike
    packs: bool = True
    multiplies: bool = True
    kept: bool = False

    def part(self, number: IntLike, nbytes: int) -> IntLike:
        """Where part `number` lies, all parts having `nbytes`."""
        return self.address + number * nbytes if self.kept else self.address


class FilterKernel:
    """An emitter of forward or backward_data.

    part_bytes    of the largest part of the packed filter; 0 if the filter is read as it is
    packed_bytes  of all parts
    """

    k: KernelBuilder
    problem: ConvolutionProblem
    part_bytes = 0
    packed_bytes = 0

    def emit_functions(self) -> None:
        """The functions that the body calls."""

    def body(self, call: Call, operands: Operands, packed: Packed) -> None:
        """The kernel; of its halves those that `packed` says."""
        raise NotImplementedError

    def memory(self, call: Call) -> IntLike:
        """Where a call that packs does so."""
        return self.k.scratch(self.part_bytes) if self.part_bytes else 0

    def emit(self) -> KernelBuilder:
        """The plain module."""
        self.emit_functions()
        with self.k.entry(ENTRY, len(self.problem.operands)) as call:
            self.body(call, self._operands(call), Packed(self.memory(call)))
        return self.k

    def emit_prepared(self) -> KernelBuilder:
        """The prepared module: the packed filter is where the entries' workspace is."""
        self.emit_functions()
        with self.k.entry(PACK, 1) as call:
            packed = Packed(call.workspace, multiplies=False, kept=True)
            self.body(call, Operands(filter=call.pointers[0]), packed)
        with self.k.entry(ENTRY, len(self.problem.operands)) as call:
            packed = Packed(call.workspace, packs=False, kept=True)
            self.body(call, self._operands(call), packed)
        return self.k

    def _operands(self, call: Call) -> Operands:
        names = [operand.name for operand in self.problem.operands]
        given = dict(zip(names, call.pointers))
        image = given["x"] if "x" in given else given["dy"]
        return Operands(image, given["w"], given.get("bias", 0), call.pointers[-1])
