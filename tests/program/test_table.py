"""Programs in plain text."""

from __future__ import annotations

from program.layouts import training_program

from weft.program.table import format_program


def test_every_instruction_has_a_line_with_its_id_and_dependencies() -> None:
    program = training_program("gpipe", 2, 2, (1, 1))
    lines = format_program(program).splitlines()
    assert lines[0] == (
        f"program: purpose train, ranks 4, steps per cycle 1, instructions {len(program)}, schedule gpipe"
    )
    assert lines[1:3] == ["group g0: ranks [0, 1]", "group g1: ranks [2, 3]"]
    rows = [line.split() for line in lines if line[:8].strip().isdigit()]
    assert [int(row[0]) for row in rows] == list(range(len(program)))
    assert [int(row[1], 16) for row in rows] == program.ids.tolist()
    assert rows[0][2:] == ["receive_gradient", "0", "0", "2", "64", "15"]
    assert rows[1][2:] == ["forward", "0", "0", "-", "-", "5-1"]
    assert rows[2][2:] == ["send_activation", "0", "0", "2", "64", "1"]
    assert rows[3][2:] == ["backward", "0", "0", "-", "-", "0", "1"]
    assert rows[4][2:] == ["reduce", "0", "-", "g0", "1000", "3"]


def test_a_large_table_is_cut_alike_for_all_ranks() -> None:
    program = training_program("gpipe", 2, 2, (5,))
    lines = format_program(program, max_rows=8).splitlines()
    rows = [line for line in lines if line[:8].strip().isdigit()]
    assert len(rows) == 8
    left_out = [line for line in lines if "more instructions" in line]
    assert sum(int(line.split()[1]) for line in left_out) == len(program) - 8
    assert format_program(program, max_rows=len(program)) == format_program(program)
