"""The command about files of other stacks: `explain`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from weft.cli.job_traces import explain_job
from weft.cli.output import Json, WrittenFile, console, print_json
from weft.describe.plan import Recompute
from weft.describe.units import counted, format_bytes, format_odds, format_seconds
from weft.doors.explained import Explanation, explain_text, layout_record
from weft.doors.implied import Answers
from weft.doors.trace.analysis import Analysis, analyse, says
from weft.doors.trace.events import is_trace, read_bytes, read_trace
from weft.doors.trace.job.files import read_job
from weft.errors import InputError, Violation
from weft.predict.cost.memory import BUFFERS


def explain(
    file: Path,
    /,
    *,
    model: str | None = None,
    on: str | None = None,
    global_batch: int | None = None,
    sequence: int | None = None,
    micro_batch_size: int | None = None,
    recompute: Recompute | None = None,
    search: bool = True,
    report: WrittenFile | None = None,
    json: Json = False,
) -> None:
    """Explain a file of another stack: layout, mistakes, prediction.

    The content determines the stack. Formats: DeepSpeed (JSON), Accelerate and Axolotl (YAML). Also
    torchtitan (TOML, or configuration in Python), and Megatron-LM (a command line or the script around it).
    A trace of torch.profiler (JSON, also .gz) can be read too, or of a job (Parquet, JSON, a folder).

    - `weft explain ds_config.json --model llama-7b --on 16xa100-80gb`
    - `weft explain train_gpt.sh --on 64xh100-80gb`
    - `weft explain trace.json.gz`

    Parameters
    ----------
    file
        The file.
    model
        A preset or a folder with a config.json, if the file does not state the model's sizes.
    on
        this-machine, an expression such as 64xa100-80gb, or a CLUSTER.toml; default: this machine.
    global_batch
        Samples per optimizer step, instead of the file's.
    sequence
        Tokens per sample, instead of the file's.
    micro_batch_size
        Samples per micro-batch, instead of the file's.
    recompute
        none, selective or full, instead of the file's.
    search
        Search weft's own best plan, too; this takes as long as `weft plan`.
    report
        Write a page about the trace of a job.
    """
    answers = Answers(
        model=model,
        on=on,
        global_batch=global_batch,
        sequence=sequence,
        micro_batch_size=micro_batch_size,
        recompute=recompute,
    )
    job = read_job(file)
    data = b"" if job is not None else read_bytes(file)
    if answers != Answers() and (job is not None or is_trace(data)):
        raise InputError(Violation(str(file), "a trace is measured and needs no options; leave them out"))
    if job is not None:
        explain_job(job, report, json=json)
        return
    if report is not None:
        raise InputError(Violation(str(file), "not the trace of a job; only these have a page"))
    if is_trace(data):
        analysis = analyse(read_trace(data, str(file)))
        print_json(analysis.record()) if json else _print_analysis(analysis)
        return
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(Violation(str(file), f"not UTF-8 text (byte {error.start})")) from None
    explanation = explain_text(text, str(file), answers, search=search)
    print_json(explanation.record()) if json else _print_explanation(explanation, searched=search)


def _print_explanation(explanation: Explanation, *, searched: bool) -> None:
    out, configuration = console(), explanation.configuration
    out.print(f"[bold]{configuration.stack}[/bold]")
    said = {
        name: value for name, value in layout_record(configuration).items() if value not in (None, [], "")
    }
    words = (f"{name.replace('_', ' ')} {_shown(value)}" for name, value in said.items())
    out.print(f"layout: {', '.join(words)}", markup=False, soft_wrap=True)
    for found in explanation.findings:
        out.print(str(found), markup=False, soft_wrap=True)
    for line in configuration.unpredicted:
        out.print(f"not predicted: {line}", markup=False, soft_wrap=True)
    for line in configuration.incomparable:
        out.print(f"not comparable: {line}", markup=False, soft_wrap=True)
    for violation in explanation.missing:
        out.print(f"missing: {violation}", markup=False, soft_wrap=True)
    if not explanation.findings:
        where = " in the rest" if configuration.incomparable else ""
        out.print(f"nothing wrong was found{where}")
    if explanation.implied is not None:
        _print_predictions(explanation, searched=searched)


def _shown(value: object) -> str:
    return " and ".join(map(str, value)) if isinstance(value, list) else str(value)


def _print_predictions(explanation: Explanation, *, searched: bool) -> None:
    out = console()
    assert explanation.implied is not None
    for line in explanation.implied.assumed:
        out.print(f"assumed {line}", markup=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    for name in ("", "layout", "step", "90 % interval", "fullest device"):
        table.add_column(name, overflow="fold")
    rows = []
    if explanation.plan is not None:
        name = "without these" if explanation.configuration.incomparable else "this file"
        rows.append((name, str(explanation.implied.layout), explanation.plan.prediction))
    best = explanation.best
    if best is not None and best.prediction is not None:
        rows.append(("weft", best.words, best.prediction))
    for name, layout, prediction in rows:
        interval = f"{format_seconds(prediction.step_low_s)} to {format_seconds(prediction.step_high_s)}"
        peak = format_bytes(max(prediction.peak_bytes))
        table.add_row(name, layout, format_seconds(prediction.step_s), interval, peak)
    if rows:
        out.print(table)
    if explanation.configuration.incomparable:
        return
    if buffers := _buffers(explanation):
        out.print(buffers, markup=False, soft_wrap=True)
    if searched:
        out.print(_verdict(explanation), markup=False, soft_wrap=True)
    elif explanation.overfull_bytes > 0:
        out.print(_overfull(explanation), markup=False, soft_wrap=True)
    if risky := _risky(explanation):
        out.print(risky, markup=False, soft_wrap=True)


def _buffers(explanation: Explanation) -> str:
    """Return one line on the buffers of the file's stack; empty where they are as weft's."""
    if explanation.plan is None or explanation.plan.plan.stack == "weft":
        return ""
    parts = [part for part in explanation.plan.held if part.name.replace(" ", "_") in BUFFERS]
    sizes = ", ".join(f"{part.name} {format_bytes(round(part.value))} +- {part.spread:.0%}" for part in parts)
    return f"in buffers: {sizes} ({parts[0].source})" if parts else ""


def _verdict(explanation: Explanation) -> str:
    """Return one line that compares weft's plan with the layout of the file."""
    over, gain_s = explanation.overfull_bytes, explanation.gain_s
    if explanation.best is None:
        return "no layout fits this cluster with this batch"
    if explanation.plan is None:
        return "this file's layout cannot run; weft's can"
    if over > 0:
        return f"{_overfull(explanation)}; weft's fits"
    assert gain_s is not None
    share = abs(gain_s) / explanation.plan.prediction.step_s
    if share < 0.005:
        return "weft would do no better"
    if gain_s < 0:
        return f"this file's layout is {format_seconds(-gain_s)} ({share:.0%}) faster than weft's best"
    return f"weft's plan takes {format_seconds(gain_s)} ({share:.0%}) less per step, by both predictions"


def _risky(explanation: Explanation) -> str:
    """Return one line on a layout that fits by a narrow margin; empty for others."""
    chance = explanation.chance_to_fit
    if chance is None or explanation.implied is None or explanation.overfull_bytes > 0:
        return ""
    if 1.0 - chance <= explanation.implied.problem.memory_risk:
        return ""
    return f"this file's layout would not fit in {format_odds(1.0 - chance)}"


def _overfull(explanation: Explanation) -> str:
    over = format_bytes(explanation.overfull_bytes)
    return f"this file's layout needs {over} more than its fullest device has"


def _print_analysis(analysis: Analysis) -> None:
    out, trace = console(), analysis.trace
    kind = "devices" if trace.on_device else "the host alone"
    device = f" ({trace.device})" if trace.device else ""
    out.print(f"[bold]trace[/bold] of {kind}{device}: {format_seconds(analysis.span_s)}")
    span = analysis.span_s or 1.0
    out.print(
        f"busy {analysis.busy_s / span:.1%}, idle {analysis.idle_s / span:.1%}, collectives "
        f"{analysis.collective_s / span:.1%}, of which exposed {analysis.exposed_s / span:.1%} of the time"
    )
    if analysis.step_s:
        lengths = [f"{number}: {format_seconds(length)}" for number, length in analysis.step_s.items()]
        shown = ", ".join(lengths[:8]) + (", ..." if len(lengths) > 8 else "")
        out.print(f"{counted(len(lengths), 'step')}; {shown}")
    for title, rows in (
        ("stream", _shares(analysis.stream_busy_s, span)),
        ("class", _shares(analysis.class_s, sum(analysis.class_s.values()) or 1.0)),
    ):
        out.print(_table((title, "busy" if title == "stream" else "time", "share"), rows))
    kernels = (
        (name, kind, str(count), format_seconds(total_s)) for name, kind, count, total_s in analysis.largest
    )
    out.print(_table(("kernel", "class", "count", "time"), kernels))
    gaps = (
        (
            format_seconds(gap.length_s),
            f"at {format_seconds(gap.start_s)}",
            "" if gap.step is None else str(gap.step),
            gap.host,
        )
        for gap in analysis.gaps
    )
    out.print(_table(("gap", "", "step", "the host was in"), gaps))
    for line in says(analysis):
        out.print(line, markup=False, soft_wrap=True)


def _shares(seconds: Mapping[str, float], whole: float) -> list[tuple[str, ...]]:
    return [(name, format_seconds(value), f"{value / whole:.1%}") for name, value in seconds.items()]


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Table:
    table = Table(*head, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    return table
