"""The peers' bindings without a GPU: finding the libraries, and what is passed to them.

The libraries here record their calls. Where NVIDIA's own are installed they are opened too.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_size_t, c_void_p
from itertools import pairwise
from types import SimpleNamespace

import pytest

from sp24cli.peers import __main__ as peers
from sp24cli.peers import cublaslt, cusparselt, loading, selfcheck
from sp24cli.peers.cublaslt import CublasLt
from sp24cli.peers.cusparselt import CusparseLt
from sp24cli.peers.loading import LibrarySource, PeerAbsent, PeerError, PeerProblem, declare


class Function:
    """A foreign function: records its arguments, checks them against the declared types."""

    def __init__(self, calls, name, action):
        self.calls, self.name, self.action = calls, name, action
        self.argtypes = None
        self.restype = None

    def __call__(self, *arguments):
        assert len(arguments) == len(self.argtypes), self.name
        for value, kind in zip(arguments, self.argtypes, strict=True):
            kind.from_param(value)  # what ctypes would do; raises on a wrong type
        self.calls.append((self.name, arguments))
        return self.action(*arguments) if self.action else 0


class Recorder:
    def __init__(self, actions, names):
        self.calls = []
        self._functions = {name: Function(self.calls, name, actions.get(name)) for name in names}

    def __getattr__(self, name):
        try:
            return self.__dict__["_functions"][name]
        except KeyError:
            raise AttributeError(name) from None

    def named(self, name):
        return [arguments for called, arguments in self.calls if called == name]


class Device:
    stream = 77

    def __init__(self):
        self.next, self.freed = 4096, []

    def alloc(self, nbytes):
        self.next += 4096
        address = self.next
        return SimpleNamespace(ptr=address, nbytes=nbytes, free=lambda: self.freed.append(address))

    def synchronize(self):
        pass


def _through(pointer, kind):
    """What a byref() argument refers to."""
    return ctypes.cast(pointer, ctypes.POINTER(kind)).contents


# Finding a library


@pytest.fixture
def source(monkeypatch):
    monkeypatch.delenv("SP24_TEST_LIB", raising=False)
    return LibrarySource("test", ("libsp24-no-such.so.9",), "SP24_TEST_LIB", ("x/lib",), "a-wheel")


def test_an_absent_library_says_what_to_install(source):
    with pytest.raises(PeerAbsent, match=r"libsp24-no-such\.so\.9 not found.*pip install a-wheel"):
        source.open()


def test_a_named_path_is_the_only_one_tried(source, monkeypatch, tmp_path):
    monkeypatch.setenv("SP24_TEST_LIB", str(tmp_path / "typo.so"))
    with pytest.raises(PeerAbsent, match=r"SP24_TEST_LIB=.*typo\.so") as caught:
        source.open()
    assert "\n" not in str(caught.value)


def test_a_wheels_library_comes_before_the_loaders_path(source, monkeypatch, tmp_path):
    monkeypatch.setattr(loading, "nvidia_wheel_roots", lambda: [tmp_path])
    found = tmp_path / "x" / "lib" / "libsp24-no-such.so.9"
    found.parent.mkdir(parents=True)
    found.write_bytes(b"not a library")
    assert list(source.candidates()) == [str(found), "libsp24-no-such.so.9"]
    # It is there but broken: that is the reason to give, not that nothing was found.
    with pytest.raises(PeerAbsent, match="libsp24-no-such"):
        source.open()


def test_a_missing_symbol_means_the_wrong_version():
    with pytest.raises(PeerAbsent, match="has no cublasLtCreate"):
        declare(Recorder({}, []), {"cublasLtCreate": []})


def test_absent_libraries_are_reasons_not_errors(monkeypatch, tmp_path):
    for name in ("SP24_CUBLASLT", "SP24_CUSPARSELT"):
        monkeypatch.setenv(name, str(tmp_path / "no.so"))
    found = selfcheck.libraries()
    assert [text.split(":")[0] for text in found] == ["cuBLASLt", "cuSPARSELt"]


def test_a_library_that_does_not_open_is_one_line(monkeypatch, capsys):
    found = SimpleNamespace(name="cuBLASLt", version="13.1.0", path="here")

    def check(device, library):
        raise PeerError("cublasLtCreate: the driver is too old")

    monkeypatch.setattr(peers, "libraries", lambda: [found])
    monkeypatch.setattr(peers, "check", check)
    monkeypatch.setattr("sp24cli.gpu.device.Device.open", lambda: None)
    assert peers.main() == 1
    assert capsys.readouterr().out.endswith("\ncuBLASLt: cublasLtCreate: the driver is too old\n")


def test_an_unknown_order_is_refused():
    with pytest.raises(ValueError, match="'xx'"):
        PeerProblem(1, 1, 1, "e4m3", "bf16", "xx")


# cuBLASLt


def test_cublaslt_structures_have_the_headers_sizes():
    assert ctypes.sizeof(cublaslt.MatmulAlgo) == 64
    assert ctypes.sizeof(cublaslt.HeuristicResult) == 96
    assert cublaslt.HeuristicResult.workspace_size.offset == 64
    assert cublaslt.HeuristicResult.state.offset == 72


@pytest.fixture
def cublas():
    made = iter(range(1000, 2000))

    def create(into, *_):
        _through(into, c_void_p).value = next(made)
        return 0

    def heuristic(*arguments):
        _through(arguments[9], c_int).value = 1
        return 0

    actions = {
        "cublasLtCreate": create,
        "cublasLtMatmulDescCreate": create,
        "cublasLtMatrixLayoutCreate": create,
        "cublasLtMatmulPreferenceCreate": create,
        "cublasLtMatmulAlgoGetHeuristic": heuristic,
        "cublasLtGetVersion": lambda: 130205,
        "cublasLtGetStatusString": lambda status: b"status %d" % status,
    }
    names = [*cublaslt._SIGNATURES, "cublasLtGetVersion", "cublasLtGetStatusString"]
    recorder = Recorder(actions, names)
    opened = CublasLt(recorder, "here")
    opened.open(Device())
    return opened, recorder


def test_cublaslt_version(cublas):
    assert cublas[0].version == "13.2.5"


@pytest.mark.parametrize(
    ("order", "rows", "columns", "first", "second"),
    [("nm", 256, 32, 11, 22), ("mn", 32, 256, 22, 11)],
)
def test_cublaslt_operands_by_order(cublas, order, rows, columns, first, second):
    """Column-major D of rows×columns is row-major columns×rows: N×M with A first."""
    opened, recorder = cublas
    plan = opened.plan(PeerProblem(256, 32, 512, "e4m3", "bf16", order, 0.25))
    layouts = [arguments[1:] for arguments in recorder.named("cublasLtMatrixLayoutCreate")]
    assert layouts == [(28, 512, rows, 512), (28, 512, columns, 512), (14, rows, columns, rows)]
    plan.enqueue(11, 22, 33)
    (call,) = recorder.named("cublasLtMatmul")
    assert (call[3], call[5], call[8], call[10]) == (first, second, 33, 33)
    assert _through(call[2], ctypes.c_float).value == 0.25
    assert _through(call[7], ctypes.c_float).value == 0.0
    assert call[15] == Device.stream


def test_cublaslt_transposes_the_first_and_does_not_promote(cublas):
    opened, recorder = cublas
    opened.plan(PeerProblem(256, 32, 512, "e4m3", "bf16", "nm"))
    seen = recorder.named("cublasLtMatmulDescSetAttribute")
    assert [(attribute, size) for _, attribute, _, size in seen] == [(3, 4), (4, 4), (25, 1)]
    (created,) = recorder.named("cublasLtMatmulDescCreate")
    assert created[1:] == (68, 0)


def test_cublaslt_float64_is_double_all_through(cublas):
    opened, recorder = cublas
    plan = opened.plan(PeerProblem(8, 4, 16, "f64", "f64", "mn"))
    (created,) = recorder.named("cublasLtMatmulDescCreate")
    assert created[1:] == (70, 1)
    plan.enqueue(1, 2, 3)
    (call,) = recorder.named("cublasLtMatmul")
    assert _through(call[2], ctypes.c_double).value == 1.0


def test_cublaslt_types_of_operands_sums_and_factors(cublas):
    """Compute and scale type, and A's and B's types in the order in which they stand."""
    opened, recorder = cublas
    kinds = [
        ("s8", "s8", "s32", "s32", 72, 10, (3, 3)),
        ("s8", "s8", "bf16", "s32", 72, 0, (3, 3)),
        ("f16", "f16", "f16", "f16", 64, 2, (2, 2)),
        ("tf32", "tf32", "f32", "f32", 77, 0, (0, 0)),
        ("e5m2", "e4m3", "bf16", "f32", 68, 0, (29, 28)),
    ]
    for a, b, out, accumulate, compute, scale, types in kinds:
        for order in ("nm", "mn"):
            recorder.calls.clear()
            problem = PeerProblem(256, 32, 512, a, out, order, 1.0, b, accumulate)
            plan = opened.plan(problem)
            (created,) = recorder.named("cublasLtMatmulDescCreate")
            assert created[1:] == (compute, scale)
            layouts = [call[1] for call in recorder.named("cublasLtMatrixLayoutCreate")]
            assert tuple(layouts[:2]) == (types if order == "nm" else types[::-1])
            plan.enqueue(1, 2, 3)
            (call,) = recorder.named("cublasLtMatmul")
            factor = {0: ctypes.c_float, 10: ctypes.c_int32, 2: ctypes.c_uint16}[scale]
            one = 0x3C00 if scale == 2 else 1
            assert factor.from_address(call[2]).value == one
            assert factor.from_address(call[7]).value == 0


def test_cublaslt_without_an_algorithm_is_a_peer_error(cublas):
    opened, recorder = cublas
    recorder._functions["cublasLtMatmulAlgoGetHeuristic"].action = lambda *_: 0
    with pytest.raises(PeerError, match="no algorithm"):
        opened.plan(PeerProblem(8, 4, 12, "e4m3", "bf16", "mn"))
    assert len(recorder.named("cublasLtMatrixLayoutDestroy")) == 3


def test_cublaslt_faults_name_the_call(cublas):
    opened, recorder = cublas
    recorder._functions["cublasLtMatmulDescCreate"].action = lambda *_: 15
    with pytest.raises(PeerError, match="cublasLtMatmulDescCreate: status 15"):
        opened.plan(PeerProblem(8, 4, 12, "e4m3", "bf16", "mn"))


# cuSPARSELt


@pytest.fixture
def cusparse():
    config = {0: 3, 1: 24}  # id and number of ids

    def get_attribute(handle, selection, attribute, data, size):
        assert size == 4
        _through(data, c_int).value = config[attribute]
        return 0

    def set_attribute(handle, selection, attribute, data, size):
        config[attribute] = _through(data, c_int).value
        return 0

    def compressed(handle, plan, size, scratch):
        _through(size, c_size_t).value, _through(scratch, c_size_t).value = 9000, 128
        return 0

    def workspace(handle, plan, size):
        _through(size, c_size_t).value = 512
        return 0

    def version(which, into):
        _through(into, c_int).value = (0, 8, 1)[which]
        return 0

    actions = {
        "cusparseLtMatmulAlgGetAttribute": get_attribute,
        "cusparseLtMatmulAlgSetAttribute": set_attribute,
        "cusparseLtSpMMACompressedSize": compressed,
        "cusparseLtMatmulGetWorkspace": workspace,
        "cusparseLtGetProperty": version,
        "cusparseLtGetErrorString": lambda status: b"error %d" % status,
    }
    names = [*cusparselt._SIGNATURES, cusparselt._SELECTION_DESTROY, "cusparseLtGetErrorString"]
    recorder = Recorder(actions, names)
    opened = CusparseLt(recorder, "here")
    opened.open(Device())
    return opened, recorder


def test_cusparselt_version(cusparse):
    assert cusparse[0].version == "0.8.1"


@pytest.mark.parametrize(("order", "lead", "written"), [("nm", 256, 1), ("mn", 32, 2)])
def test_cusparselt_descriptors(cusparse, order, lead, written):
    opened, recorder = cusparse
    opened.plan(PeerProblem(256, 32, 512, "e4m3", "bf16", order))
    (a,) = recorder.named("cusparseLtStructuredDescriptorInit")
    assert a[2:] == (256, 512, 512, 16, 28, 2, 0)  # M×K row-major, 50 %
    b, d = recorder.named("cusparseLtDenseDescriptorInit")
    assert b[2:] == (512, 32, 512, 16, 28, 1)  # K×N column-major
    assert d[2:] == (256, 32, lead, 16, 14, written)
    (matmul,) = recorder.named("cusparseLtMatmulDescriptorInit")
    assert matmul[2:4] == (0, 0)
    assert matmul[4:8] == (a[1], b[1], d[1], d[1])
    assert matmul[8] == 2  # CUSPARSE_COMPUTE_32F


@pytest.mark.parametrize(
    ("a", "out", "accumulate", "types"),
    [
        ("s8", "s32", "s32", (3, 10, 0)),
        ("s8", "bf16", "s32", (3, 14, 0)),
        ("f16", "f16", "f16", (2, 2, 1)),
        ("tf32", "f32", "f32", (0, 0, 2)),
        ("e5m2", "bf16", "f32", (29, 14, 2)),
    ],
)
def test_cusparselt_types(cusparse, a, out, accumulate, types):
    opened, recorder = cusparse
    opened.plan(PeerProblem(256, 32, 512, a, out, "nm", accumulate=accumulate))
    (of_a,) = recorder.named("cusparseLtStructuredDescriptorInit")
    b, d = recorder.named("cusparseLtDenseDescriptorInit")
    (matmul,) = recorder.named("cusparseLtMatmulDescriptorInit")
    assert (of_a[6], b[6], d[6], matmul[8]) == (types[0], types[0], types[1], types[2])


def test_cusparselt_default_and_id(cusparse):
    opened, recorder = cusparse
    default = opened.plan(PeerProblem(256, 32, 512, "f16", "f16", "nm"))
    assert (default.algorithm, default.algorithm_count) == (3, 24)
    assert not recorder.named("cusparseLtMatmulAlgSetAttribute")
    chosen = opened.plan(PeerProblem(256, 32, 512, "f16", "f16", "nm"), 7)
    assert chosen.algorithm == 7
    assert chosen.label == "cuSPARSELt id 7 nm"


def test_cusparselt_product_and_compression(cusparse):
    opened, recorder = cusparse
    plan = opened.plan(PeerProblem(256, 32, 512, "f16", "f16", "nm", 0.5))
    assert plan.compressed_bytes == 9000
    plan.compress(11, 22)
    (compress,) = recorder.named("cusparseLtSpMMACompress")
    assert compress[2:4] == (11, 22)
    assert compress[5] == Device.stream
    plan.enqueue(22, 33, 44)
    (call,) = recorder.named("cusparseLtMatmul")
    assert call[3:5] == (22, 33)
    assert call[6:8] == (44, 44)
    assert ctypes.c_float.from_address(call[2]).value == 0.5
    assert ctypes.c_float.from_address(call[5]).value == 0.0
    assert _through(call[9], c_void_p).value == Device.stream
    assert call[10] == 1


def test_cusparselt_opaque_structures_are_aligned_and_apart(cusparse):
    opened, recorder = cusparse
    opened.plan(PeerProblem(256, 32, 512, "f16", "f16", "nm"))
    (matmul,) = recorder.named("cusparseLtMatmulDescriptorInit")
    places = sorted({matmul[0], matmul[1], *matmul[4:8]})
    assert all(place % 64 == 0 for place in places)
    # 0.8 has 512 bytes, 0.7 had 1024, older versions 11024.
    assert all(b - a >= 11024 for a, b in pairwise(places))


def test_cusparselt_frees_what_it_made_when_refused(cusparse):
    opened, recorder = cusparse
    recorder._functions["cusparseLtMatmulPlanInit"].action = lambda *_: 10
    with pytest.raises(PeerError, match="cusparseLtMatmulPlanInit: error 10"):
        opened.plan(PeerProblem(256, 32, 512, "f16", "f16", "nm"))
    assert len(recorder.named("cusparseLtMatDescriptorDestroy")) == 3
    assert not recorder.named("cusparseLtMatmulPlanDestroy")


def test_cusparselt_frees_once(cusparse):
    opened, recorder = cusparse
    plan = opened.plan(PeerProblem(256, 32, 512, "f16", "f16", "nm"))
    plan.free()
    plan.free()
    assert len(recorder.named("cusparseLtMatmulPlanDestroy")) == 1
    assert len(recorder.named("cusparseLtMatmulAlgSelectionDestroy")) == 1
    assert len(opened._device.freed) == 1  # the workspace


# The real ones


@pytest.mark.parametrize("kind", [CublasLt, CusparseLt])
def test_installed_libraries_open_and_name_their_errors(kind):
    try:
        opened = kind.load()
    except PeerAbsent as absent:
        pytest.skip(str(absent))
    assert all(part.isdigit() for part in opened.version.split("."))
    known = {CublasLt: (15, "supported"), CusparseLt: (10, "supported")}[kind]
    assert known[1] in opened.status_text(known[0])
