"""Every CUDA source compiled by nvcc for every GPU that it knows: no spills, and 16 bytes an access."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

CUDA = Path(__file__).parents[2] / "kernels" / "cuda"
NVCC, CUOBJDUMP = shutil.which("nvcc"), shutil.which("cuobjdump")
pytestmark = pytest.mark.skipif(NVCC is None, reason="there is no nvcc to compile the CUDA sources with")

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")

Macros = tuple[tuple[str, object], ...]


def copying(vector: int, plane: int, **others: object) -> Macros:
    sizes = {"VECTOR_BYTES": vector, "PLANE_BYTES": plane, "PAGE_STRIDE": 64 * plane + 4096 - 64 * plane % 4096}
    return tuple((sizes | others).items())


def quantising(dtype: str, format: str, vector: int = 16, plane: int = 32768) -> Macros:
    kinds = {"DTYPE": f"DTYPE_{dtype}", "FORMAT": f"FORMAT_{format}", "CODES_OFFSET": 256}
    return copying(vector, plane, **kinds)


# Vectors of a plane: a few (lanes), a whole tile, many tiles, a tile that is not full, and vectors of other widths.
WIDE = {
    "copy-64": copying(16, 64),
    "copy-4096": copying(16, 4096),
    "copy-32768": copying(16, 32768),
    "copy-4112": copying(16, 4112),
    "copy-20000": copying(16, 20000),
    **{
        f"quantise-{dtype}-{format}": quantising(dtype, format)
        for dtype in ("float32", "float16", "bfloat16")
        for format in ("fp8", "int8")
    },
}
NARROW = {
    **{f"copy-{vector}-wide": copying(vector, 1000 * vector) for vector in (8, 4, 2, 1)},
    **{f"copy-{vector}-wide-small": copying(vector, 3 * vector) for vector in (8, 4, 2, 1)},
    "quantise-float32-fp8-4-wide": quantising("float32", "fp8", 4, 48),
    "quantise-bfloat16-int8-1-wide": quantising("bfloat16", "int8", 1, 1000),
}
EVERY = WIDE | NARROW


def source_of(name: str) -> Path:
    return CUDA / f"{name.split('-')[0]}.cu"


@cache
def known_architectures() -> Sequence[str]:
    assert NVCC is not None
    return subprocess.run([NVCC, "--list-gpu-code"], capture_output=True, text=True, check=True).stdout.split()


@dataclass(frozen=True)
class Compiled:
    """`report` is what the compiler said of registers and memory."""

    report: str
    ptx: str
    cubin: Path

    def kernels(self) -> dict[str, str]:
        """PTX of each kernel."""
        return dict(re.findall(r"^\.visible \.entry (\w+)\((.*?)^\}", self.ptx, re.MULTILINE | re.DOTALL))


@cache
def compiled(name: str, architecture: str, folder: Path) -> Compiled:
    """Warnings are errors. One run of nvcc makes both the PTX and the machine code."""
    assert NVCC is not None
    place = folder / f"{name}-{architecture}"
    place.mkdir()
    cubin = place / "kernels.cubin"
    flags = ["-std=c++17", "-Werror", "all-warnings", "-Xptxas", "-v", f"-arch={architecture}"]
    defines = [f"-D{key}={value}" for key, value in EVERY[name]]
    outputs = ["-cubin", "-keep", "-keep-dir", str(place), "-o", str(cubin)]
    done = subprocess.run(
        [NVCC, *flags, *defines, *outputs, str(source_of(name))], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, f"{name} for {architecture}:\n{done.stderr}"
    return Compiled(done.stderr, (place / f"{source_of(name).stem}.ptx").read_text(), cubin)


def accesses(ptx: str) -> dict[str, Counter[str]]:
    """How often each kind of access to memory occurs, by what it is for: `load`, `store`, `index` or `local`.

    Tables of pages and planes are read by `ld.global.nc`, payload never; parameters and shared memory do not count.
    A generic address would be `ld` or `st` without a space, and counts as local.
    """
    found: dict[str, Counter[str]] = {kind: Counter() for kind in ("load", "store", "index", "local")}
    for verb, qualifiers in re.findall(r"^\s*(?:@!?%p\d+ )?(ld|st|red|atom)\.(\S+)", ptx, re.MULTILINE):
        space, *rest = qualifiers.split(".")
        width = ".".join(re.sub(r"^[bs](?=\d)", "u", part) for part in rest if re.fullmatch(r"v\d|[bsu]\d+", part))
        if space in ("param", "shared"):
            continue
        kind = "local" if space != "global" else "index" if "nc" in rest else "load" if verb == "ld" else "store"
        found[kind][width] += 1
    return found


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("nvcc")


@pytest.fixture(params=ARCHITECTURES)
def architecture(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name not in known_architectures():
        pytest.skip(f"this nvcc does not know {name}")
    return name


@pytest.mark.parametrize("name", EVERY)
def test_it_compiles_without_spills(name: str, architecture: str, folder: Path) -> None:
    report = compiled(name, architecture, folder).report
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report)
    assert frames == [("0", "0", "0")] * 2, report


@pytest.mark.parametrize("name", WIDE)
def test_all_payload_moves_16_bytes_at_a_time(name: str, architecture: str, folder: Path) -> None:
    """Counted over whole kernels, so that no loop can hide a narrower access. The scale of a plane is the exception."""
    for kernel, ptx in compiled(name, architecture, folder).kernels().items():
        found = accesses(ptx)
        scales = {"gather_quantised": "store", "scatter_quantised": "load"}
        for kind in ("load", "store"):
            widths = {"v4.u32", "u32"} if scales.get(kernel) == kind else {"v4.u32"}
            assert {*found[kind]} == widths, (kernel, found)
            assert found[kind]["u32"] <= 1, (kernel, found)
        assert {*found["index"]} == {"u32", "u64"} and not found["local"], (kernel, found)


@pytest.mark.parametrize("name, rows", [("copy-64", 8), ("copy-4096", 8), ("copy-32768", 8), ("copy-20000", 8)])
def test_a_thread_has_all_its_loads_in_flight(name: str, rows: int, architecture: str, folder: Path) -> None:
    """The accesses of payload in the order of the code: all loads, then all stores."""
    for kernel, ptx in compiled(name, architecture, folder).kernels().items():
        order = re.findall(r"(ld|st)\.global(?:\.L1::no_allocate)?\.v4", ptx)
        assert order == ["ld"] * rows + ["st"] * rows, kernel


@pytest.mark.parametrize("name", NARROW)
def test_payload_moves_by_the_width_it_was_compiled_for(name: str, folder: Path) -> None:
    architecture = next(known for known in ARCHITECTURES if known in known_architectures())
    vector = dict(EVERY[name])["VECTOR_BYTES"]
    codes = {8: "v2.u32", 4: "u32", 2: "u16", 1: "u8"}[int(str(vector))]
    for kernel, ptx in compiled(name, architecture, folder).kernels().items():
        side = "store" if kernel.startswith("gather") else "load"
        found = accesses(ptx)
        assert codes in found[side] and not found["local"], (kernel, found)
        if name.startswith("copy"):
            assert {*found["load"]} == {*found["store"]} == {codes}, (kernel, found)


@pytest.mark.skipif(CUOBJDUMP is None, reason="there is no cuobjdump to read machine code with")
@pytest.mark.parametrize("name", WIDE)
def test_the_machine_code_moves_16_bytes_at_a_time(name: str, architecture: str, folder: Path) -> None:
    assert CUOBJDUMP is not None
    cubin = compiled(name, architecture, folder).cubin
    code = subprocess.run([CUOBJDUMP, "-sass", str(cubin)], capture_output=True, text=True, check=True).stdout
    for kernel in code.split("Function : ")[1:]:
        assert re.search(r"\bLDG\.E\S*\.128\b", kernel) and re.search(r"\bSTG\.E\S*\.128\b", kernel), kernel
        assert not re.search(r"\b(LDL|STL)\b", kernel), kernel


@pytest.mark.parametrize("source", sorted(CUDA.glob("*.cu*")), ids=lambda path: path.name)
def test_nothing_is_included_that_a_compiler_at_run_time_would_lack(source: Path) -> None:
    included = re.findall(r"^\s*#\s*include\s*(.*)$", source.read_text(), re.MULTILINE)
    assert {*included} <= {f'"{path.name}"' for path in CUDA.glob("*.cuh")}


def test_the_patterns_find_what_they_are_for() -> None:
    found = accesses(
        """
        ld.global.L1::no_allocate.v4.u32 {%r1, %r2, %r3, %r4}, [%rd1];
        @%p1 ld.global.nc.u64 %rd1, [%rd2];
        @!%p1 st.global.v4.b32 [%rd1], {%r1, %r2, %r3, %r4};
        st.global.u8 [%rd1], %r1;
        ld.u32 %r1, [%rd1];
        st.local.v2.u32 [%rd1], {%r1, %r2};
        ld.param.u64 %rd1, [kernel_param_0];
        st.shared.u32 [%rd1], %r1;
        """
    )
    wanted = {
        "load": {"v4.u32": 1},
        "store": {"v4.u32": 1, "u8": 1},
        "index": {"u64": 1},
        "local": {"": 1, "v2.u32": 1},
    }
    assert found == {kind: Counter(widths) for kind, widths in wanted.items()}
