"""The report as one HTML file: no script, no font, no image from elsewhere, so it can be mailed and still be read."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Sequence
from html import escape
from typing import Final

from vtoken.bench import plots
from vtoken.bench.report import Report, TargetReport
from vtoken.bench.table import HEADINGS, LEGEND, run_rows, show_pair, show_value
from vtoken.bench.targets import counted

_STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2126; background: #fff; max-width: 1120px;
  margin: 2.5rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.7rem; margin: 0 0 .3rem; } h2 { font-size: 1.2rem; margin: 2.4rem 0 .6rem; }
h3 { font-size: 1rem; margin: 1.4rem 0 .3rem; }
p { max-width: 46rem; } .dim { color: #626a73; } figure { margin: .8rem 0 1.6rem; }
figcaption { color: #626a73; font-size: .88rem; max-width: 46rem; } img { max-width: 100%; height: auto; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .84rem; font-variant-numeric: tabular-nums; }
th, td { padding: .28rem .6rem; text-align: right; border-bottom: 1px solid #e4e6e8; vertical-align: top; }
th { color: #626a73; font-weight: 600; border-bottom: 2px solid #c9cdd1; position: sticky; top: 0; background: #fff; }
td.text, th.text { text-align: left; } tr.first td { border-top: 2px solid #c9cdd1; }
.met { color: #17733c; font-weight: 600; } .missed { color: #b3261e; font-weight: 600; } .not { color: #626a73; }
.arm { font-weight: 600; }
"""


def to_html(report: Report) -> str:
    """Raises ConfigError where there is no matplotlib."""
    plots.check_matplotlib()
    body = [
        "<h1>vtoken bench reclaim</h1>",
        f'<p class="dim">vtoken {escape(report.vtoken)}, {escape(report.created)}. Evicted tokens leave holes; this is '
        "what giving their memory back is worth. The arms run the same jobs through the same scheduler and books, and "
        "lose the same tokens.</p>",
        f"<h2>Targets: {counted(report.targets)}</h2>",
        _targets(report.targets),
        *_pictures(report),
        *_sweeps(report),
        "<h2>All runs</h2>",
        '<p class="dim">Blocks are means over all tokens of all answers; seconds of a simulated device are those of '
        "its roofline, and planning is host time as measured.</p>",
        f'<p class="dim">{escape(LEGEND)}.</p>',
        _table(HEADINGS, run_rows(report.runs), texts=3),
        "<h2>Against naive eviction</h2>",
        _comparisons(report),
        *_probes(report),
        "<h2>Settings</h2>",
        _facts(report.settings),
        "<h2>Workloads</h2>",
        _table(
            ("workload", "jobs", "prompt", "answer", "longest text", "where the lengths come from"),
            [
                (
                    one.name,
                    str(one.num_jobs),
                    f"{one.mean_prompt_tokens:.0f}",
                    f"{one.mean_output_tokens:.0f}",
                    str(one.longest),
                    one.about,
                )
                for one in report.workloads
            ],
            texts=1,
        ),
        "<h2>Machine</h2>",
        _facts(report.machine),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>vtoken bench reclaim</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _targets(targets: Sequence[TargetReport]) -> str:
    rows = []
    for target in targets:
        if target.verdict == "not measured":
            continue
        wanted, measured = show_pair(target)
        kind = {"met": "met", "missed": "missed"}.get(target.verdict, "not")
        rows.append(
            f'<tr><td class="text">{escape(target.name)}<br><span class="dim">{escape(target.statement)}</span></td>'
            f"<td>{escape(wanted)}</td><td>{escape(measured)}</td>"
            f'<td class="{kind}">{target.verdict}</td>'
            f'<td class="text">{escape(target.where)}<br><span class="dim">{escape(target.why)}</span></td>'
            f'<td class="text dim">{escape(target.how)}</td></tr>'
        )
    heads = ("what", "wanted", "measured", "", "where, and why", "how it is computed")
    header = "".join(f"<th{' class=text' if i in (0, 4, 5) else ''}>{head}</th>" for i, head in enumerate(heads))
    others = [target.name for target in targets if target.verdict == "not measured"]
    left_out = f'<p class="dim">Not measured here: {escape("; ".join(others))}.</p>' if others else ""
    return f'<div class="wide"><table><tr>{header}</tr>{"".join(rows)}</table></div>{left_out}'


def _pictures(report: Report) -> Iterable[str]:
    for picture in report.pictures:
        yield f"<h2>{escape(str(picture.cell))}</h2>"
        yield _figure(
            plots.retained_over_time(picture),
            f"Retained blocks over time, a running request, in a pool of {picture.cell.num_blocks} blocks. Dotted: "
            "ceil(live / block size), the least that holds what lives.",
        )
        yield _figure(plots.running_over_time(picture), "Requests that run at once in the same pool.")
        yield _figure(
            plots.occupancy(picture),
            "How full held blocks are, over all steps: naive keeps blocks with a few survivors each.",
        )
        if picture.slots_before is not None and picture.slots_after is not None:
            shown = len(picture.slots_before)
            part = "" if shown == picture.cell.num_blocks else f" (the first {shown} blocks)"
            yield _figure(
                plots.slots(picture.slots_before, picture.slots_after),
                f"Every cell of the pool{part}, a block a column, before and after the largest reclaim of the run, and "
                f"before any is handed out again: {picture.blocks_returned} blocks came back.",
            )


def _sweeps(report: Report) -> Iterable[str]:
    if not report.sweeps:
        return
    yield "<h2>Throughput against latency</h2>"
    for cell in dict.fromkeys(sweep.cell for sweep in report.sweeps):
        some = [sweep for sweep in report.sweeps if sweep.cell == cell]
        yield f"<h3>{escape(str(cell))}</h3>"
        yield _figure(
            plots.throughput_against_latency(some),
            "A point a limit on the requests that run at once, in a pool of "
            f"{cell.num_blocks} blocks. The SLA is 1.05 x the decode p95 of native with no limit.",
        )
        rows = [
            (
                sweep.arm,
                str(sweep.sustained),
                str(sweep.knee),
                f"{max(point.throughput for point in sweep.points):,.0f}",
                f"{sweep.throughput_within:,.0f}",
            )
            for sweep in some
        ]
        heads = ("arm", "most at once without preemption", "knee (5 %)", "most tokens/s", "most within the SLA")
        yield _table(heads, rows, texts=1)


def _comparisons(report: Report) -> str:
    heads = (
        "workload",
        "policy",
        "arm",
        "erased",
        "block",
        "naive's blocks",
        "blocks",
        "floor",
        "reduction",
        "at the floor",
        "ceiling",
        "same victims",
    )
    rows = [
        (
            one.cell.workload,
            one.cell.policy,
            one.arm,
            f"{one.cell.ratio:.0%}",
            str(one.cell.block_size),
            f"{one.naive_retained_blocks:.2f}",
            f"{one.retained_blocks:.2f}",
            f"{one.floor_blocks:.2f}",
            f"{one.reduction:.1%}",
            f"{one.possible:.1%}",
            f"{one.ceiling:.1%}",
            "yes" if one.has_same_victims else "NO",
        )
        for one in report.comparisons
    ]
    return _table(heads, rows, texts=3)


def _probes(report: Report) -> Iterable[str]:
    if report.steady is not None:
        one = report.steady
        yield "<h2>Steady decode at a fixed budget</h2>"
        yield (
            f"<p>{escape(one.policy)}, {one.budget} tokens a request, a pool of {one.num_blocks} blocks: in "
            f"{one.steps} steps {one.tokens_evicted} tokens died, their cells took the new ones, and "
            f"{one.bytes_copied} bytes were copied.</p>"
        )
    if report.overhead is not None:
        over = report.overhead
        yield "<h2>With the pool half empty</h2>"
        yield (
            f"<p>{escape(over.policy)}, ready to evict under pressure, {over.peak_held_blocks} of {over.num_blocks} "
            f"blocks held at most: {over.reclaim_plans} reclaim plans, {over.tokens_evicted} tokens evicted. A decode "
            f"step takes {over.vtoken_step_seconds * 1e3:.3f} ms against {over.native_step_seconds * 1e3:.3f} ms: "
            f"{over.overhead:+.2%}, spread of {len(over.rounds)} rounds {show_value(over.spread, 'share')}.</p>"
        )


def _facts(facts: dict[str, object] | dict[str, str]) -> str:
    rows = "".join(
        f'<tr><td class="text">{escape(str(name))}</td><td class="text">{escape(str(value))}</td></tr>'
        for name, value in facts.items()
    )
    return f"<table>{rows}</table>"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, texts: int) -> str:
    """The first `texts` columns are text, and so is a last one that is long."""

    def cell(tag: str, i: int, text: str) -> str:
        kind = ' class="text"' if i < texts or len(text) > 40 else ""
        return f"<{tag}{kind}>{escape(text)}</{tag}>"

    lines = ["<tr>" + "".join(cell("th", i, head) for i, head in enumerate(heads)) + "</tr>"]
    last = None
    for row in rows:
        first = ' class="first"' if last is not None and row[:2] != last else ""
        last = row[:2]
        lines.append(f"<tr{first}>" + "".join(cell("td", i, text) for i, text in enumerate(row)) + "</tr>")
    return f'<div class="wide"><table>{"".join(lines)}</table></div>'


def _figure(png: bytes, caption: str) -> str:
    image = b64encode(png).decode()
    return (
        f'<figure><img alt="{escape(caption)}" src="data:image/png;base64,{image}">'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )
