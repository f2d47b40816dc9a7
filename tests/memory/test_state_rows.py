"""Rows of a padded state, gathered, scattered and cleared, against plain loops over the raw buffer, byte for byte."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvactors.errors import LocalError, StateError
from kvactors.memory import clear_state_rows_, gather_state_rows, scatter_state_rows_, state_views
from kvactors.memory import state_rows as module
from kvactors.memory.state_moves import CpuMoves, IndexMoves, as_integers

PAGES, OFFSET = 5, 7
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ROWS = [1023, 1024, 1025, 131072]
MOVES = [CpuMoves(), IndexMoves()]


@pytest.fixture(params=MOVES, ids=["cpu", "any-device"], autouse=True)
def moves(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test runs on the CPU's way to move rows and on the one of devices without kernels of their own."""
    torch.manual_seed(0)
    monkeypatch.setattr(module, "moves_for", lambda _device: request.param)


class Padded(NamedTuple):
    """A raw buffer, and a state that lies in it with `padding` elements behind each row."""

    raw: Any
    state: Any
    row: int
    padding: int

    def at(self, page: int) -> slice:
        begin = OFFSET + page * (self.row + self.padding)
        return slice(begin, begin + self.row)

    def rows(self, *pages: int) -> Any:
        return torch.stack([self.raw[self.at(page)] for page in pages])


def padded(row: int, padding: int, dtype: Any, pages: int = PAGES, inner: tuple[int, ...] | None = None) -> Padded:
    """Random bits, NaNs and infinities among them; compare the bits."""
    raw = random_bits(OFFSET + pages * (row + padding) + 3, dtype)
    shape = (row,) if inner is None else inner
    steps = [torch.Size(shape[i + 1 :]).numel() for i in range(len(shape))]
    return Padded(raw, raw.as_strided((pages, *shape), (row + padding, *steps), OFFSET), row, padding)


def random_bits(count: int, dtype: Any) -> Any:
    return torch.randint(-128, 128, (count * dtype.itemsize,), dtype=torch.int8).view(dtype)


def same_bits(a: Any, b: Any) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("padding", [0, 13])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_rounds_of_gather_and_scatter(dtype: Any, row: int, padding: int, index_dtype: Any) -> None:
    at = padded(row, padding, dtype)
    for order in ([3, 0, 4], [1], [4, 3, 2, 1, 0], [2, 2, 2]):
        indices = torch.tensor(order, dtype=index_dtype)
        flags = torch.tensor([i % 2 == 0 for i in range(len(order))])
        expected = at.rows(*order)
        assert same_bits(gather_state_rows(at.state, indices), expected)
        expected[~flags] = 0
        assert same_bits(gather_state_rows(at.state, indices, flags), expected)
        if len(set(order)) == len(order):
            after, fresh = at.raw.clone(), random_bits(len(order) * row, dtype).view(-1, row)
            for page, values in zip(order, fresh, strict=True):
                after[at.at(page)] = values
            assert scatter_state_rows_(at.state, indices, fresh) is at.state
            assert same_bits(at.raw, after)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("padding", [0, 13])
def test_clearing_leaves_every_other_byte(dtype: Any, row: int, padding: int) -> None:
    at = padded(row, padding, dtype)
    after = at.raw.clone()
    after[at.at(3)] = 0
    after[at.at(1)] = 0
    indices, flags = torch.tensor([3, 99, 1]), torch.tensor([False, True, False])
    assert clear_state_rows_(at.state, indices, flags) is at.state
    assert same_bits(at.raw, after)
    clear_state_rows_(at.state, None, torch.tensor([True, True, False, True, True]))
    after[at.at(2)] = 0
    assert same_bits(at.raw, after)


@given(st.data())
def test_any_calls_do_what_a_loop_over_the_raw_buffer_does(data: st.DataObject) -> None:
    torch.manual_seed(0)
    pages = data.draw(st.integers(1, 6), "pages")
    inner = tuple(data.draw(st.lists(st.integers(1, 4), min_size=0, max_size=3), "row shape"))
    row = torch.Size(inner).numel()
    at = padded(row, data.draw(st.integers(0, 5), "padding"), data.draw(st.sampled_from(DTYPES)), pages, inner)
    model: list[Any] = list(at.raw.clone())  # one entry an element of the raw buffer
    for _ in range(data.draw(st.integers(1, 4), "calls")):
        call = data.draw(st.sampled_from(["gather", "scatter", "clear"]))
        picked = data.draw(st.lists(st.integers(0, pages - 1), max_size=6, unique=call == "scatter"), "indices")
        flags = data.draw(st.lists(st.booleans(), min_size=len(picked), max_size=len(picked)), "flags")
        indices = torch.tensor(picked, dtype=data.draw(st.sampled_from([torch.int32, torch.int64])))
        mask = torch.tensor(flags, dtype=torch.bool)
        if call == "gather":
            out = gather_state_rows(at.state, indices, mask)
            assert out.shape == (len(picked), *inner)
            zero = torch.zeros((), dtype=at.raw.dtype)
            for got, page, flag in zip(out, picked, flags, strict=True):
                expected = model[at.at(page)] if flag else [zero] * row
                assert same_bits(got.reshape(-1), torch.stack(expected))
        elif call == "scatter":
            rows = random_bits(len(picked) * row, at.raw.dtype).view(len(picked), *inner)
            scatter_state_rows_(at.state, indices, rows)
            for page, values in zip(picked, rows, strict=True):
                model[at.at(page)] = list(values.reshape(-1))
        else:
            clear_state_rows_(at.state, indices, mask)
            for page, flag in zip(picked, flags, strict=True):
                if not flag:
                    model[at.at(page)] = [torch.zeros((), dtype=at.raw.dtype)] * row
        assert same_bits(at.raw, torch.stack(model))


@given(st.permutations(range(PAGES)), st.integers(0, PAGES), st.sampled_from([0, 1, 13]), st.sampled_from([1, 63, 64]))
def test_scattering_what_was_gathered_changes_no_byte(order: list[int], count: int, padding: int, row: int) -> None:
    torch.manual_seed(0)
    at = padded(row, padding, torch.bfloat16)
    before, indices = at.raw.clone(), torch.tensor(order[:count], dtype=torch.int64)
    scatter_state_rows_(at.state, indices, gather_state_rows(at.state, indices))
    assert same_bits(at.raw, before)


def test_the_states_of_one_page_do_not_touch_each_other() -> None:
    raw = random_bits(4 * 1024, torch.int8)
    conv, ssm = state_views(raw, [(3, 20), (2, 8, 8)], [torch.float16, torch.float32], 1024, blocks=4)
    before, indices = raw.clone(), torch.tensor([2, 0])
    held = gather_state_rows(conv, indices)
    scatter_state_rows_(ssm, indices, torch.ones(2, 2, 8, 8))
    assert same_bits(gather_state_rows(conv, indices), held)
    changed = (raw.view(4, 1024) != before.view(4, 1024)).any(0)
    assert not changed[:120].any()
    assert not changed[120 + 512 :].any()


def test_a_row_without_a_state_is_zeros_whatever_its_index_says() -> None:
    at = padded(8, 2, torch.float32)
    at.state[4] = float("nan")
    indices, flags = torch.tensor([4, -1, 99, 0]), torch.tensor([False, False, False, True])
    out = gather_state_rows(at.state, indices, flags)
    assert torch.equal(out[:3], torch.zeros(3, 8))
    assert same_bits(out[3], at.rows(0)[0])
    assert torch.equal(gather_state_rows(at.state, indices[:3], flags[:3]), torch.zeros(3, 8))


def test_types_are_cast_on_the_way_out_and_back() -> None:
    state = torch.tensor([[1.5, 2.5], [3.25, -4.0]], dtype=torch.bfloat16)
    out = gather_state_rows(state, torch.tensor([1]), None, torch.float32)
    assert out.dtype == torch.float32
    assert out.tolist() == [[3.25, -4.0]]
    scatter_state_rows_(state, torch.tensor([0]), torch.tensor([[1 / 3, 7.0]], dtype=torch.float64))
    assert state.tolist() == [[torch.tensor(1 / 3).bfloat16().item(), 7.0], [3.25, -4.0]]


def test_rows_may_be_strided_in_any_way_and_lie_in_the_state() -> None:
    state = torch.arange(12.0).view(3, 2, 2)
    scatter_state_rows_(state, torch.tensor([2]), torch.arange(4.0).view(1, 2, 2).mT)
    assert state[2].tolist() == [[0.0, 2.0], [1.0, 3.0]]
    held = state.clone()
    scatter_state_rows_(state, torch.tensor([1, 2, 0]), state)  # each row one page further
    assert torch.equal(state[[1, 2, 0]], held)


def test_out_is_filled_and_returned() -> None:
    at = padded(1025, 13, torch.float16)
    out = random_bits(2 * 1025, torch.float16).view(2, 1025)
    assert gather_state_rows(at.state, torch.tensor([4, 1]), out=out) is out
    assert same_bits(out, at.rows(4, 1))
    at.state.copy_(torch.randn(PAGES, 1025))  # a cast need not keep the bits of a signalling NaN
    wide = torch.ones(2, 1025)
    flags = torch.tensor([False, True])
    assert gather_state_rows(at.state, torch.tensor([4, 1]), flags, torch.float32, out=wide) is wide
    assert same_bits(wide, torch.stack([torch.zeros(1025), at.rows(1)[0].float()]))


def test_nothing_asked_for_is_nothing_done() -> None:
    state = torch.ones(5, 8)
    none, flags = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.bool)
    assert gather_state_rows(state, none).shape == (0, 8)
    assert gather_state_rows(state, none, flags, torch.float16).dtype == torch.float16
    scatter_state_rows_(state, none, torch.empty(0, 8))
    clear_state_rows_(state, none, flags)
    assert torch.equal(state, torch.ones(5, 8))


@pytest.mark.parametrize("shape", [(0, 8), (5, 0), (0,)])
def test_an_empty_state_is_refused_whatever_is_asked_for(shape: tuple[int, ...]) -> None:
    state, none, flags = torch.ones(shape), ints(), bools()
    refused("is empty", state, lambda: gather_state_rows(state, none))
    refused("is empty", state, lambda: gather_state_rows(state, none, flags, check_range=False))
    refused("is empty", state, lambda: scatter_state_rows_(state, none, torch.empty(0, *shape[1:])))
    refused("is empty", state, lambda: clear_state_rows_(state, none, flags))
    refused("is empty", state, lambda: clear_state_rows_(state, bools(*[False] * shape[0])))


def test_rows_are_cleared_by_their_flags_alone() -> None:
    """Positionally, by keyword, and without indices in the form of three arguments."""
    flags = bools(True, False, True, False, True)
    for clear in (
        lambda state: clear_state_rows_(state, flags),
        lambda state: clear_state_rows_(state, has_initial_state=flags),
        lambda state: clear_state_rows_(state, None, flags),
        lambda state: clear_state_rows_(state, indices=ints(3, 9, 1), has_initial_state=bools(False, True, False)),
    ):
        at = padded(8, 2, torch.float16)
        after = at.raw.clone()
        after[at.at(1)] = 0
        after[at.at(3)] = 0
        assert clear(at.state) is at.state
        assert same_bits(at.raw, after)
    state = STATE.clone()
    forget: Any = clear_state_rows_
    refused("one bool for each", state, lambda: clear_state_rows_(state, bools(True)))
    refused("one bool for each", state, lambda: clear_state_rows_(state, ints(0, 1, 2, 3, 4)))
    refused("has_initial_state is missing", state, lambda: forget(state))


def test_the_check_of_the_indices_may_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the one thing that waits for a device; all else is still checked, and the bytes are the same."""

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("the indices' values were looked at")

    at, indices, flags = padded(8, 2, torch.float32), ints(4, 2), bools(True, False)
    monkeypatch.setattr(module, "_check_range", never)
    out = gather_state_rows(at.state, indices, flags, check_range=False)
    assert same_bits(out[0], at.rows(4)[0])
    assert not out[1].any()
    with pytest.raises(AssertionError):
        gather_state_rows(at.state, indices)
    scatter_state_rows_(at.state, ints(0, 1), torch.ones(2, 8), check_range=False)
    assert same_bits(at.rows(0, 1), torch.ones(2, 8))
    scatter_state_rows_(at.state, ints(0, 0), torch.zeros(2, 8), check_range=False)  # the same row twice: any wins
    assert not at.rows(0).any()
    clear_state_rows_(at.state, ints(3, 1), bools(True, False), check_range=False)
    assert not at.rows(1).any()
    refused("must be one dimension", STATE, lambda: gather_state_rows(STATE, ints(0)[None], check_range=False))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_tensors_that_require_a_gradient_are_read_and_written_like_others(dtype: Any) -> None:
    state, rows = torch.randn(3, 2, 4, requires_grad=True), torch.randn(2, 2, 4, dtype=dtype, requires_grad=True)
    got = gather_state_rows(state, ints(2, 0), None, dtype)
    assert not got.requires_grad
    assert torch.equal(got, state.detach()[[2, 0]].to(dtype))
    out = torch.zeros(2, 2, 4, dtype=dtype, requires_grad=True)
    assert gather_state_rows(state, ints(2, 0), None, dtype, out=out) is out
    assert torch.equal(out.detach(), got)
    scatter_state_rows_(state, ints(1, 0), rows)
    assert torch.equal(state.detach()[[1, 0]], rows.detach().float())
    clear_state_rows_(state, ints(1), bools(False))
    assert not state.detach()[1].any()
    assert (state.requires_grad, state.grad_fn) == (True, None)


@pytest.mark.parametrize("shape", [(3, 1, 4, 1), (3, 1), (3,), (1, 6)])
def test_dimensions_of_one_and_rows_of_one(shape: tuple[int, ...]) -> None:
    state = torch.arange(float(torch.Size(shape).numel())).view(shape)
    page = shape[0] - 1
    assert torch.equal(gather_state_rows(state, torch.tensor([page])), state[page:])
    scatter_state_rows_(state, torch.tensor([page]), torch.full((1, *shape[1:]), -1.0))
    assert (state[page] == -1).all()


def strided(size: tuple[int, ...], stride: tuple[int, ...]) -> Any:
    return torch.ones(64).as_strided(size, stride)


def ints(*values: int) -> Any:
    return torch.tensor(values, dtype=torch.int64)


def bools(*values: bool) -> Any:
    return torch.tensor(values, dtype=torch.bool)


STATE = torch.arange(10.0).view(5, 2)
BAD_STATES = {
    "pages overlap": (strided((4, 4), (3, 1)), "pages overlap"),
    "every page is the same": (strided((4, 4), (0, 1)), "pages overlap"),
    "inner padding": (strided((3, 2, 3), (8, 4, 1)), "only the first dimension may be padded"),
    "inner dimensions swapped": (strided((3, 2, 3), (6, 1, 2)), "only the first dimension may be padded"),
    "no pages": (torch.empty(0, 4), "is empty"),
    "empty rows": (torch.empty(4, 0), "is empty"),
    "no dimension": (torch.tensor(1.0), "one dimension or more"),
}
BAD_INDICES = {
    "below": (ints(0, -1), "index -1 is outside the 5 pages"),
    "above": (ints(5, 0), "index 5 is outside the 5 pages"),
    "floats": (torch.tensor([0.0]), "must be one dimension of int32 or int64"),
    "bytes": (torch.tensor([0], dtype=torch.uint8), "must be one dimension of int32 or int64"),
    "two dimensions": (torch.zeros(1, 1, dtype=torch.int64), "must be one dimension of int32 or int64"),
    "another device": (torch.empty(1, dtype=torch.int64, device="meta"), "must be the same device"),
}
BAD_FLAGS = {
    "too few": (bools(True), "one bool for each"),
    "not bools": (ints(1, 0), "one bool for each"),
    "another device": (torch.empty(2, dtype=torch.bool, device="meta"), "must be the same device"),
}
BAD_ROWS = {
    "too few": (torch.ones(1, 2), r"must be \(2, 2\)"),
    "too long": (torch.ones(2, 3), r"must be \(2, 2\)"),
    "a type that does not cast": (torch.ones(2, 2, dtype=torch.complex64), "do not cast to torch.float32"),
    "another device": (torch.empty(2, 2, device="meta"), "must be the same device"),
}
BAD_OUTS = {
    "too few rows": (torch.ones(1, 2), "must be dense"),
    "another type": (torch.ones(2, 2, dtype=torch.float16), "must be dense"),
    "strided": (torch.ones(2, 4)[:, :2], "must be dense"),
}


def cases(table: dict[str, tuple[Any, str]]) -> Any:
    return pytest.mark.parametrize(("bad", "says"), table.values(), ids=table.keys())


@cases(BAD_STATES)
def test_a_bad_state_is_refused(bad: Any, says: str) -> None:
    rows = torch.ones(1, *bad.shape[1:])
    refused(says, bad, lambda: gather_state_rows(bad, ints(0)))
    refused(says, bad, lambda: scatter_state_rows_(bad, ints(0), rows))
    refused(says, bad, lambda: clear_state_rows_(bad, ints(0), bools(False)))


@cases(BAD_INDICES)
def test_bad_indices_are_refused(bad: Any, says: str) -> None:
    state, flags = STATE.clone(), torch.zeros(bad.shape, dtype=torch.bool)
    refused(says, state, lambda: gather_state_rows(state, bad))
    refused(says, state, lambda: gather_state_rows(state, bad, ~flags))
    refused(says, state, lambda: scatter_state_rows_(state, bad, torch.ones(len(bad), 2)))
    refused(says, state, lambda: clear_state_rows_(state, bad, flags))


@cases(BAD_FLAGS)
def test_bad_flags_are_refused(bad: Any, says: str) -> None:
    state = STATE.clone()
    refused(says, state, lambda: gather_state_rows(state, ints(0, 1), bad))
    refused(says, state, lambda: clear_state_rows_(state, ints(0, 1), bad))
    refused("one bool for each", state, lambda: clear_state_rows_(state, None, bools(True)))


@cases(BAD_ROWS)
def test_bad_rows_are_refused(bad: Any, says: str) -> None:
    state = STATE.clone()
    refused(says, state, lambda: scatter_state_rows_(state, ints(0, 1), bad))


@cases(BAD_OUTS)
def test_a_bad_out_is_refused(bad: Any, says: str) -> None:
    refused(says, bad, lambda: gather_state_rows(STATE, ints(0, 1), out=bad))


def test_out_in_the_state_and_a_type_that_does_not_cast_are_refused() -> None:
    state = STATE.clone()
    refused("shares its memory with the state", state, lambda: gather_state_rows(state, ints(0, 1), out=state[2:4]))
    refused("do not cast to torch.int8", state, lambda: gather_state_rows(state, ints(0), None, torch.int8))


def test_a_page_is_scattered_once() -> None:
    state = STATE.clone()
    refused("an index repeats", state, lambda: scatter_state_rows_(state, ints(3, 1, 3), torch.ones(3, 2)))


def refused(says: str, unchanged: Any, act: Any) -> None:
    before = unchanged.clone()
    with pytest.raises(StateError, match=says) as caught:
        act()
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, LocalError)
    assert torch.equal(unchanged, before)


@pytest.mark.parametrize(
    ("row", "stride", "offset", "width"),
    [(8, 8, 0, 8), (8, 12, 4, 8), (6, 8, 0, 4), (8, 10, 0, 4), (8, 8, 2, 4), (7, 8, 0, 2), (8, 9, 0, 2), (8, 8, 3, 2)],
)
def test_the_widest_integers_that_divide_everything(row: int, stride: int, offset: int, width: int) -> None:
    pages = torch.ones(64, dtype=torch.float16).as_strided((3, row), (stride, 1), offset)
    (found,) = as_integers(pages)
    assert found.element_size() == width
    assert found.data_ptr() == pages.data_ptr()
