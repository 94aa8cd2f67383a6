"""What is compiled: all that is called, in order; and what is kept of it follows every file of the room."""

from pathlib import Path
from types import FunctionType

from weft.predict.cycle import run
from weft.predict.engine import CALLED, MODULES, compiled_run_cycle, digest_of


def test_every_function_comes_after_those_it_calls():
    names = {name: value for module in MODULES for name, value in vars(module).items()}
    ready = set()
    for function in (*CALLED, run.run_cycle):
        called = {names[name] for name in function.__code__.co_names if name in names}
        assert {one for one in called if isinstance(one, FunctionType)} <= ready
        ready.add(function)


def test_a_change_of_any_file_is_another_digest(tmp_path):
    copies = []
    for module in MODULES:
        source = Path(module.__file__)
        copies.append(tmp_path / source.name)
        copies[-1].write_bytes(source.read_bytes())
    digests = {digest_of(copies)}
    for copy in copies:
        copy.write_bytes(copy.read_bytes() + b"\n")
        digests.add(digest_of(copies))
    assert len(digests) == 1 + len(MODULES)


def test_what_is_kept_is_named_by_the_digest():
    digest = digest_of(Path(module.__file__) for module in MODULES)
    assert compiled_run_cycle().py_func.__qualname__ == f"run_cycle_{digest}"
