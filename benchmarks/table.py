"""Write measured results into the README, between two comments; nobody edits what lies between them:

    python -m benchmarks.table [README.md]

    <!-- results: agent -->      results/agent-<model>.json   (gufo bench agent)
    <!-- results: serve -->      results/serve-<model>.json   (gufo bench serve)
    <!-- results: restart -->    results/restart-<model>.json (gufo bench restart)
    <!-- results: ablations -->  results/ablations.json       (gufo bench ablations)

Each ends at ``<!-- /results -->``.  A part whose results are not there keeps its text.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.agent.ablations import SERVED
from benchmarks.agent.workloads import WORKLOADS
from benchmarks.common import RESULTS, median

Data = dict[str, Any]
_PART = re.compile(r"(<!-- results: (\w+) -->\n).*?(<!-- /results -->)", re.S)
_TITLES = {w.name: f"({w.letter[0]}) {w.title}" for w in WORKLOADS}


_KEYS = {"agent": "lines", "serve": "cases", "restart": "samples", "ablations": "whole_over_shared"}
"""What tells results of a kind from others with a similar name."""


def _newest(kind: str, results: Path) -> list[Data]:
    """Results of a kind, by model, newest first."""
    files = sorted(results.glob(f"{kind}*.json"), key=lambda p: p.stat().st_mtime, reverse=True)
    return [data for p in files if _KEYS[kind] in (data := json.loads(p.read_text()))]


def _setting(data: Data) -> str:
    e, s = data["environment"], data["settings"]
    return f"{s['model']}, scale {s['scale']:g}, {s['threads']} thread(s), {s['rounds']} round(s), {e['cores']} cores"


def agent_table(data: Data) -> list[str]:
    """One line per workload.  Processor time stands beside wall time because a busy machine does not change it."""
    lines = data["lines"]
    servers = list(dict.fromkeys(x["server"] for x in lines))
    peers = [s for s in servers if s != "gufo"]
    out = [
        "| " + " | ".join(["workload", "prompt tokens", "prefilled", "/ budgeted oracle", "/ common prefix",
                           *(f"{p}: prefilled" for p in peers), *(f"wall (processor) time / {p}'s" for p in peers),
                           "first token p50 / p95 / max", "wrong answers"]) + " |",
        "|" + "---|" * (7 + 2 * len(peers)),
    ]  # fmt: skip
    for name in dict.fromkeys(x["workload"] for x in lines):
        by = {x["server"]: x for x in lines if x["workload"] == name}
        own = by.get("gufo")
        if own is None:
            continue
        wall, cpu = ({s: median(x[key]) for s, x in by.items()} for key in ("wall_s", "cpu_s"))
        ttft = own["first_token_ms"]
        cells = [
            _TITLES.get(name, name), f"{own['prompt_tokens']:,}", f"{own['prefilled']:,}",
            f"{own['of_bound']:.2f}", f"{own['of_common_prefix']:.2f}",
            *(f"{by[p]['prefilled']:,}" if p in by else "-" for p in peers),
            *(f"{wall['gufo'] / wall[p]:.2f} ({cpu['gufo'] / cpu[p]:.2f})" if p in by else "-" for p in peers),
            f"{ttft['p50']:.0f} / {ttft['p95']:.0f} / {ttft['max']:.0f} ms",
            _wrong(own),
        ]  # fmt: skip
        out.append("| " + " | ".join(cells) + " |")
    return [f"{_setting(data)}:", "", *out]


def _wrong(line: Data) -> str:
    answers = line["answers"]
    return f"{answers['wrong']} of {answers['compared']}" if answers else "-"


def serve_table(data: Data) -> list[str]:
    out = [f"{data['model']}, speed of gufo over llama-server's (median of pairs, quartiles):", ""]
    out += ["| case | ratio | pairs |", "|---|---|---|"]
    for name, case in data["cases"].items():
        middle, least, largest = case["ratio"]
        out.append(f"| {name} | {middle:.3f} ({least:.2f} .. {largest:.2f}) | {len(case['samples']['gufo'])} |")
    return out


def restart_table(data: Data) -> list[str]:
    out = [f"{data['model']}, one conversation of {data['tokens']:,} tokens:", ""]
    out += ["| after the restart | first token | tokens prefilled |", "|---|---|---|"]
    for name, got in data["samples"].items():
        first = median([s["first_ms"] for s in got])
        out.append(f"| {name} | {first:,.0f} ms | {got[0]['prefilled']:,.0f} |")
    return out


def ablation_table(data: Data) -> list[str]:
    names = data["workloads"]

    def row(what: str, values: dict[str, float], form: str) -> str:
        return f"| {what} | " + " | ".join(format(values[n], form) if n in values else "-" for n in names) + " |"

    out = [
        f"The cache and scheduler without a model (exact counts), private state as large as that of "
        f"{data['shape']}, scale {data['scale']:g}:",
        "",
        "| | " + " | ".join(_TITLES.get(n, n) for n in names) + " |",
        "|" + "---|" * (len(names) + 1),
        row("tokens prefilled", data["prefilled"], ","),
        row("over the budgeted oracle (goal 1.15)", data["of_bound"], ".2f"),
    ]
    out += [row(f"{r['what']}: prefilled, x", r["ratio"], ".2f") for r in data["rows"] if "eager" not in r["what"]]
    out += [row("eager copies: row bytes copied while requests run, x", r["copied"], ".1f")
            for r in data["rows"] if "eager" in r["what"]]  # fmt: skip
    out.append(row("whole copies instead of chunks: bytes kept, x", data["whole_over_shared"], ".1f"))
    return out + _served_table(data["served"]["scale"], data["served"]["prefilled"])


def _served_table(scale: float, served: dict[str, dict[str, int]]) -> list[str]:
    """What needs real servers: prefilled tokens by workload and server."""
    if not served:
        return []
    out = ["", f"On real servers, tiny qwen4exp, scale {scale:g}:", ""]
    out += ["| | " + " | ".join(_TITLES.get(n, n) for n in served) + " |", "|" + "---|" * (len(served) + 1)]
    out.append("| tokens prefilled | " + " | ".join(f"{got['gufo']:,}" for got in served.values()) + " |")
    for what, server in SERVED.items():
        cells = " | ".join(f"{got[server] / got['gufo']:.2f}" for got in served.values())
        out.append(f"| {what}: prefilled, x | {cells} |")
    return out


PARTS: dict[str, Callable[[Data], list[str]]] = {
    "agent": agent_table, "serve": serve_table, "restart": restart_table, "ablations": ablation_table,
}  # fmt: skip


def fill(text: str, results: Path = RESULTS) -> str:
    """The text with every part whose results are there written anew."""

    def part(match: re.Match[str]) -> str:
        found = _newest(match[2], results) if match[2] in PARTS else []
        if not found:
            return match[0]
        tables = ["\n".join(PARTS[match[2]](data)) for data in found]
        return match[1] + "\n".join(["", "\n\n".join(tables), "", ""]) + match[3]

    return _PART.sub(part, text)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="gufo bench table", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", nargs="?", type=Path, default=Path("README.md"), help="default: README.md")
    path: Path = parser.parse_args(arguments).file
    text = path.read_text(encoding="utf-8")
    path.write_text(fill(text), encoding="utf-8")
    print(f"{path}: {', '.join(m[1] for m in _PART.findall(text)) or 'no marked part'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
