"""Help, version, completion, progress and error messages."""

from __future__ import annotations

import argparse
import importlib
import io
import json
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from planner.cli.main import COMMANDS, EXAMPLE, main, parser
from planner.cli.plan_command import GROUPS
from planner.cli.progress import CLEAR, Progress
from planner.report.page import GENERATOR


def commands() -> dict[str, argparse.ArgumentParser]:
    """By name."""
    found = next(a for a in parser()._actions if isinstance(a, argparse._SubParsersAction))
    return dict(found.choices)


def arguments() -> Iterator[tuple[str, argparse.Action]]:
    """Of all commands."""
    for name, sub in commands().items():
        for action in sub._actions:
            yield name, action


def test_every_argument_has_help_and_a_documented_default() -> None:
    """Every optional argument states what happens without it."""
    for name, action in arguments():
        where = f"{name} {action.option_strings or action.dest}"
        assert action.help, where
        silent = action.default in (None, False, [], argparse.SUPPRESS)
        assert silent or "default" in action.help, where


def test_options_of_plan_are_grouped() -> None:
    """Each option is in a group, most important first, within 80 columns."""
    said = commands()["plan"].format_help()
    main_options = said.split("main options:")[1].split("\n\n")[0]
    for option in GROUPS["main options"]:
        assert f"  {option} " in main_options
    listed = [option for options in GROUPS.values() for option in options]
    known = {action.option_strings[0] for action in commands()["plan"]._actions}
    assert sorted(listed) == sorted(known - {"-h", "--json", "-v", "-q"})


def test_every_example_parses() -> None:
    """Each is of its own command and on one line of the help."""
    for name in COMMANDS:
        module = importlib.import_module(f"planner.cli.{name}_command")
        said = commands()[name].format_help()
        assert said.rstrip().splitlines()[-1] == f"{EXAMPLE}{module.EXAMPLE}"
        words = shlex.split(module.EXAMPLE.split(" > ")[0])
        words = words[words.index("planner") + 1 :]
        assert words[0] == name
        assert parser().parse_args(words).run is module.run


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """Version of the installed package."""
    from importlib import metadata

    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"planner {metadata.version('planner')}\n"


def completed(script: Path, *words: str) -> set[str]:
    """What bash would offer."""
    shell = (
        f"source {shlex.quote(str(script))}; COMP_WORDS=({' '.join(map(shlex.quote, words))}); "
        f"COMP_CWORD={len(words) - 1}; _shtab_planner; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_bash_completes_commands_options_and_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Networks and models by name, files otherwise."""
    pytest.importorskip("shtab")
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "planner"
    script.write_text(capsys.readouterr().out)
    assert completed(script, "planner", "co") == {"compare", "completion"}
    assert completed(script, "planner", "plan", "--codec") == {"--codec"}
    assert "aws8_dtfm_worldwide_2022" in completed(script, "planner", "plan", "--network", "aws8")
    assert "gpt3-1.3b" in completed(script, "planner", "plan", "--workload", "gpt3-1.3")
    assert completed(script, "planner", "plan", "--averaging", "e") == {"equal"}


def test_completion_without_its_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line with the remedy."""
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "zsh"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "needs shtab, which is not installed;" in error


def test_lines_fit_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Output for networks, simulated and checked plans, also with long names."""
    from planner.training_plan.file import save_plan
    from tests.conftest import make_plan

    plan, pairs = tmp_path / "plan.json", tmp_path / "pairs.csv"
    save_plan(make_plan([[0, 1]]), plan)
    pairs.write_text("source,destination,rtt_ms\nthe first machine,another machine,10\n")
    for words in (
        ["networks"],
        ["networks", str(pairs), "--bandwidth-gbps", "1"],
        ["simulate", str(plan)],
        ["check", str(plan)],
    ):
        assert main(words) == 0
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) > 1
        assert [line for line in lines if len(line) > 80 and str(tmp_path) not in line] == []


class Terminal(io.StringIO):
    """A stream that says it is one."""

    def isatty(self) -> bool:
        """It is."""
        return True


def test_progress_is_one_line_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line is rewritten and finally erased; a log gets few lines without control characters."""
    now = [100.0]
    monkeypatch.setattr("planner.cli.progress.time.perf_counter", lambda: now[0])
    for stream, control in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr(sys, "stderr", stream)
        progress = Progress()
        progress.begin(now[0])
        for quarter in range(120):
            now[0] += 0.25
            progress.show(f"searching {quarter}")
        progress.clear()
        text = stream.getvalue()
        assert ("\x1b" in text) is control
        assert text.count("\n") == (0 if control else 3)
        assert text.endswith(CLEAR) is control
        assert "   30.0 s  searching 119" in text or not control


def test_phase_is_printed_at_once_in_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the previous line is recent."""
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    progress = Progress()
    progress.begin(time.perf_counter())
    for words in ("starting", "measuring"):
        progress.phase(words)
        progress.show("between")
    lines = stream.getvalue().splitlines()
    assert [line.split("s  ")[1] for line in lines] == ["starting", "measuring"]


def test_progress_clock_runs_without_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example during compilation; nothing is printed after the line was cleared."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    progress = Progress()
    progress.begin(time.perf_counter())
    progress.start("preparing")
    end = time.perf_counter() + 60
    while stream.getvalue().count("preparing") < 2 and time.perf_counter() < end:
        time.sleep(0.05)
    assert stream.getvalue().count("preparing") >= 2
    progress.clear()
    said = stream.getvalue()
    assert said.endswith(CLEAR)
    time.sleep(0.5)
    assert stream.getvalue() == said


def test_plan_with_report_in_a_pipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No colours; the page equals that of ``planner report``; files of others are not "
    "overwritten."""
    plan, page = tmp_path / "plan.json", tmp_path / "page.html"
    words = "plan --network aws4_dtfm_regional_2022 --workload gpt2-tiny --stages auto --effort 0.1"
    words += " --no-compare --no-pictures --random-placements 0"
    command = [*words.split(), "--out", str(plan), "--report", str(page)]
    assert main(command) == 0
    printed = capsys.readouterr()
    assert "\x1b" not in printed.out + printed.err
    assert str(page) in printed.out and GENERATOR in page.read_text()
    assert main(["report", str(plan), "--out", str(tmp_path / "other.html")]) == 0
    mine, other = (path.read_text() for path in (page, tmp_path / "other.html"))
    assert mine == other
    assert "<td>4 stages x 1 pipeline, microbatches of 1</td>" in mine
    page.write_text("mine")
    assert main(command) == 2
    assert "did not make it" in capsys.readouterr().err and page.read_text() == "mine"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("compare a.json b.json c.json", "planner compare: unrecognized arguments: c.json; see"),
        ("check --x 1 a.json", "planner check: unrecognized arguments: --x"),
        ("networks nope --out q.csv", "nope: cannot be read (no such file or folder); check the"),
    ],
)
def test_unknown_arguments_are_reported(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command, not the one above it."""
    try:
        code = main(words.split())
    except SystemExit as error:
        code = int(error.code or 0)
    assert code == 2 and said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "plan --network x.csv --worklod y",
            "arguments: --worklod (did you mean --workload?); see",
        ),
        ("plan --netwrok=x.csv --workload y", "arguments: --netwrok (did you mean --network?)"),
        ("plan --network x --workload y --stges 4", "--stges 4 (did you mean --stages?)"),
        ("plan --workload y", "the following arguments are required: --network; see planner plan"),
        ("plna", "invalid choice: 'plna'"),
        ("plna", "(did you mean 'plan'?); see planner --help"),
        ("plan --network x --workload y --wiring flwo", "(did you mean 'flow'?)"),
        ("plan --network aws8_dtfm_worldwde_2022 --workload gpt2-tiny", "dtfm_worldwide_2022'?)"),
        (
            "plan --network aws8_dtfm_worldwide_2022 --workload GPT2-tny",
            "no workload 'GPT2-tny' (did you mean 'gpt2-tiny'?)",
        ),
    ],
)
def test_misspelt_words_get_a_suggestion(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In place of the required option that seems to be missing."""
    try:
        code = main(words.split())
    except SystemExit as error:
        code = int(error.code or 0)
    told = capsys.readouterr().err
    assert code == 2 and said in told and told.count("\n") == 1


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--memory-gb", "-1", "--memory-gb is -1.0; it must be a number > 0, finite"),
        ("--memory-gb", "0", "--memory-gb is 0.0; it must be a number > 0"),
        ("--usd-per-hour", "nan", "--usd-per-hour is nan; it must be a number >= 0, finite"),
        ("--intra-latency-ms", "-5", "--intra-latency-ms is -5.0; it must be a number >= 0"),
        ("--intra-bandwidth-gbps", "0", "--intra-bandwidth-gbps is 0.0; it must be a number > 0"),
    ],
)
def test_errors_use_the_unit_of_the_option(
    option: str, value: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not with the field and the SI units that they become."""
    words = ["plan", "--network", "aws4_dtfm_regional_2022", "--workload", "gpt2-tiny"]
    assert main([*words, "--devices-per-region", "2", option, value]) == 2
    assert capsys.readouterr().err.startswith(f"planner plan: {said}")


def test_run_without_pytorch(tmp_path: Path) -> None:
    """One line with the remedy, exit code 2."""
    from planner.training_plan.file import save_plan
    from tests.conftest import make_plan

    plan = tmp_path / "plan.json"
    save_plan(make_plan([[0, 1]]), plan)
    for command in (
        ["run", str(plan), "--steps", "1"],
        ["weights", str(plan), "--checkpoint", "kept", "--out", str(tmp_path / "model")],
    ):
        script = (
            "import sys\n"
            "sys.modules['torch'] = None\n"
            "from planner.cli.main import main\n"
            f"sys.exit(main({command!r}))"
        )
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=False
        )
        said = f"planner {command[0]}: needs torch, which is not installed; pip install torch\n"
        assert (done.returncode, done.stderr) == (2, said)


@pytest.mark.parametrize("options", [[], ["--stages", "2"], ["--wiring", "flow"]])
def test_missing_pair(options: list[str], tmp_path: Path) -> None:
    """One line, without NumPy warnings before it; tested in a new process."""
    path = tmp_path / "net.csv"
    path.write_text("source,destination,rtt_ms,bandwidth_mbps\nA,B,10,100\nB,A,,\n")
    words = ["--network", str(path), "--workload", "gpt2-tiny", "--sequence", "32"]
    done = subprocess.run(
        [sys.executable, "-m", "planner.cli", "plan", *words, "--batch-samples", "8", *options],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "1 ordered pair is not measured, the first is 'B' to 'A'" in done.stderr


def test_table_of_one_direction_gets_a_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only where the other direction is there."""
    (tmp_path / "ping.csv").write_text("source,destination,rtt_ms\na,b,10\na,c,10\nb,c,10\n")
    table = [str(tmp_path / "ping.csv"), "--bandwidth-gbps", "1"]
    assert main(["networks", *table]) == 0
    assert "--both-ways copies them" in capsys.readouterr().out
    assert main(["networks", *table, "--both-ways"]) == 0
    assert "missing" not in capsys.readouterr().out
    (tmp_path / "ping.csv").write_text("source,destination,rtt_ms\na,b,10\nb,a,10\na,c,1\nc,a,1\n")
    assert main(["networks", *table]) == 0
    assert "--both-ways" not in capsys.readouterr().out


def test_verbose_logs_solver_progress(capsys: pytest.CaptureFixture[str]) -> None:
    """To stderr; nothing is logged without the option."""
    command = ["assign", "--network", "aws8_dtfm_worldwide_2022", "--stages", "4"]
    command += [
        "--pipelines",
        "2",
        "--activation-bytes",
        "8e6",
        "--gradient-bytes",
        "1e9",
        "--effort",
        "0.1",
    ]
    assert main([*command, "-v"]) == 0
    said = capsys.readouterr().err.splitlines()
    assert said and all(" planner.search.incumbent: " in line for line in said)
    assert main([*command, "-q"]) == 0
    assert capsys.readouterr().err == ""


def test_the_given_microbatch_size_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One device alone is the best plan, in whatever microbatches."""
    (tmp_path / "net.csv").write_text("from,to,latency_ms,bandwidth_gbps\na,b,50,0.1\nb,a,50,0.1\n")
    words = f"plan --network {tmp_path / 'net.csv'} --gpu A100 --workload gpt2-tiny --batch-samples"
    options = ["--out", str(tmp_path / "plan.json"), "--effort", "0.05", "--no-pictures", "--json"]
    for samples in (1, 2, 16):
        command = [*words.split(), "16", "--microbatch-samples", str(samples), *options]
        assert main(command) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["microbatch_samples"] == samples


def test_parameters_in_messages_are_options(capsys: pytest.CaptureFixture[str]) -> None:
    """Messages name options as they are typed; words and fields of files stay."""
    words = "plan --network aws8_dtfm_worldwide_2022 --workload gpt2-tiny"
    for options, said in (
        ("--microbatch-samples 0", "--microbatch-samples is 0;"),
        ("--stages 99", "--stages is 99; it must be from 1 to the 8 devices"),
        ("--stage-sizes 4,4", "give --path-stages (all stages for full paths), or leave --stage-s"),
        ("--within region", "--within goes with --sync-every above 1, found --sync-every 1;"),
        ("--stages 3", "8 devices cannot be divided into 3 equal stages;"),
    ):
        assert main([*words.split(), *options.split()]) == 2
        assert said in capsys.readouterr().err
