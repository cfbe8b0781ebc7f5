"""Texts from arguments or a file become rows for people and for machines; what is wrong is named by file and row."""

import io
import itertools
import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reprise.serving import scoring
from reprise.serving.classifier import Classifier, Prediction
from reprise.serving.scoring import (
    Scored,
    find_model,
    print_scored,
    printable,
    read_texts,
    score_file,
    score_texts,
    to_json,
)


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


# -------------------------------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize(
    ("name", "content", "column", "expected"),
    [
        ("a.csv", "id,text\n1,my card\n2,top up\n", None, ["my card", "top up"]),
        ("a.csv", "body\nmy card\n", None, ["my card"]),
        ("a.csv", "body,text\nmy card,no\n", "body", ["my card"]),
        ("a.csv", 'text,id\r\n"two\r\nlines, and ""quotes""",1\r\n', None, ['two\r\nlines, and "quotes"']),
        ("a.csv", "\ufefftext,id\nmy card,1\n", None, ["my card"]),
        ("a.csv", '\ufeff"text",id\nmy card,1\n', None, ["my card"]),
        ("a.csv", "id,text\n1,\n\n2,NA\n3,001\n4,null\n", None, ["", "NA", "001", "null"]),
        ("a.csv", "text\n", None, []),
        ("a.csv", "text\nno end of line", None, ["no end of line"]),
        ("a.csv", 'text\n5" screen\n', None, ['5" screen']),
        ("A.TSV", 'text\tlabel\na, b\tx\n"quoted\ttab"\ty\n', None, ["a, b", "quoted\ttab"]),
        ("a.txt", "my card\n\n  top up\r\nlast", None, ["my card", "", "  top up", "last"]),
        ("a.txt", "one line\u2028still the same\n", None, ["one line\u2028still the same"]),
        ("a.txt", "", None, []),
        ("a.jsonl", '{"text": "my card", "id": 1}\n\n{"id": 2, "text": "\\ud83d\\ude00"}\n', None, ["my card", "😀"]),
        ("a.jsonl", '{"body": "my card"}\n', None, ["my card"]),
        ("a.jsonl", '{"text": "no", "body": "my card"}', "body", ["my card"]),
        ("a.csv", "text\n" + "x" * 200_000 + "\n", None, ["x" * 200_000]),
    ],
)
def test_texts_are_read_as_written(tmp_path: Path, name: str, content: str, column: str | None, expected: list[str]) -> None:
    assert list(read_texts(write(tmp_path / name, content), column)) == expected


@pytest.mark.parametrize(
    ("name", "content", "column", "message"),
    [
        ("a.parquet", "PAR1", None, r"cannot read \.parquet; give one of \.csv"),
        ("a", "text", None, "a file without a suffix"),
        ("a.csv", "", None, "empty file"),
        ("a.csv", "\n\n", None, "no column at all"),
        ("a.csv", "id,body\n1,x\n", None, "no column 'text'; found id, body"),
        ("a.csv", "id,text\n1,x\n", "Text", "no column 'Text'; found id, text"),
        ("a.csv", "text,text\n1,x\n", None, "more than one column 'text'"),
        ("a.csv", "text;label\nhello;x\n", None, "looks separated by ';'"),
        ("a.csv", "text\tlabel\nhello\tx\n", None, "a .tsv file by tabs"),
        ("a.tsv", "text,label\nhello,x\n", None, "looks separated by ','"),
        ("a.csv", "text\nok\nhello, world\n", None, r"row 2 has 2 fields, the header has 1 \(text\)"),
        ("a.csv", "id,text\n1,ok\n2\n", None, "row 2 has 1 fields, the header has 2"),
        ("a.csv", 'text\nok\n"never closed\nmore\n', None, r"row 2, which ends on line 4: .*close every double quote"),
        ("a.csv", 'text\nok\n"closed"too early\n', None, "row 2, which ends on line 3"),
        ("a.csv", b"text\nok\nfa\xe7ade\n", None, r"line 3, byte 10 of the file \(0xe7\) is not UTF-8"),
        ("a.txt", "text\n".encode("utf-16"), None, r"line 1, byte 0 of the file \(0xff\)"),
        ("a.txt", "x", "text", "a .txt file has no columns"),
        ("a.jsonl", "", None, "empty file"),
        ("a.jsonl", '{"text": "a"}\n{"text": \n', None, "line 2 is not JSON"),
        ("a.jsonl", '["a"]\n', None, "line 1 is a JSON list"),
        ("a.jsonl", '{"text": "a"}\n{"body": "b"}\n', None, "line 2 has no 'text'; found body"),
        ("a.jsonl", '{"text": null}\n', None, "line 1, 'text' is null"),
        ("a.jsonl", '{"text": 5}\n', None, "line 1, 'text' is 5"),
        ("a.jsonl", '{"a": "x", "b": "y"}\n', None, "no column 'text'; found a, b"),
        ("a.jsonl", '{"text": "a"}\n{"text": "\\ud83d"}\n', None, "line 2, 'text' holds half a surrogate pair"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, name: str, content: str | bytes, column: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        list(read_texts(write(tmp_path / name, content), column))
    assert name in str(caught.value)


def test_a_missing_file_and_a_folder_are_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.csv: no such file"):
        read_texts(tmp_path / "none.csv")
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(ValueError, match="a folder"):
        read_texts(tmp_path / "folder.csv")
    with pytest.raises(ValueError, match="no column 'text'"):
        read_texts(write(tmp_path / "a.csv", "a,b\n"))


def test_an_open_quote_does_not_swallow_the_rest_of_a_large_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "MAX_FIELD_CHARACTERS", 1000)
    path = write(tmp_path / "a.csv", 'text\n"never closed\n' + "line\n" * 10_000)
    with pytest.raises(ValueError, match="field larger than field limit"):
        list(read_texts(path))


# -------------------------------------------------------------------------------------------------------------- scoring


def test_rows_keep_text_and_prediction_together(classifier: Classifier, sentences: list[str]) -> None:
    rows = list(score_texts(classifier, iter(sentences), batch_size=3))
    assert [row.text for row in rows] == sentences
    assert [row.prediction.label for row in rows] == [p.label for p in classifier.predict(sentences)]
    assert not any(row.calibrated for row in rows)


def test_a_file_gives_what_its_texts_give(classifier: Classifier, sentences: list[str], tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "".join(f"{text}\n" for text in sentences))
    labels = [row.prediction.label for row in score_file(classifier, path)]
    assert labels == [p.label for p in classifier.predict(sentences)]


def test_scoring_is_a_stream(classifier: Classifier) -> None:
    endless: Iterator[str] = (f"card {i}" for i in itertools.count())
    assert [row.text for row in itertools.islice(score_texts(classifier, endless, 2), 3)] == ["card 0", "card 1", "card 2"]


def test_memory_does_not_grow_with_the_file(classifier: Classifier, tmp_path: Path) -> None:
    class Nowhere(io.StringIO):
        def write(self, text: str) -> int:
            return len(text)

    def peak(num_rows: int) -> int:
        path = write(tmp_path / "a.csv", "text,id\n" + "".join(f"card {i % 97},{i}\n" for i in range(num_rows)))
        tracemalloc.start()
        try:
            assert print_scored(score_file(classifier, path, batch_size=16), Nowhere(), "json") == num_rows
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(512)
    assert peak(8192) < 1.5 * peak(1024)


# -------------------------------------------------------------------------------------------------------------- writing


def scored(text: str, label: str = "a", probability: float = 0.75, calibrated: bool = False) -> Scored:
    rest = {"b": 0.2, "c": 1 - probability - 0.2}
    return Scored(text, Prediction(label, probability, {label: probability, **rest}, truncated=False), calibrated)


def test_a_line_of_json_holds_what_machines_need() -> None:
    assert json.loads(to_json(scored('grüße\n"x"'))) == {
        "text": 'grüße\n"x"',
        "label": "a",
        "probability": 0.75,
        "probabilities": {"a": 0.75, "b": 0.2, "c": 0.05},
        "calibrated": False,
        "truncated": False,
    }


@given(text=st.text())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_row_of_json_and_of_lines_is_one_line(text: str) -> None:
    for layout in ("json", "lines"):
        out = io.StringIO()
        assert print_scored([scored(text)], out, layout) == 1  # type: ignore[arg-type]  # the loop widens the literals
        assert out.getvalue().count("\n") == 1
        assert out.getvalue().endswith("\n")
        if layout == "json":
            assert json.loads(out.getvalue())["text"] == text


@pytest.mark.parametrize("layout", ["lines", "table"])
def test_people_are_told_that_probabilities_are_uncalibrated(layout: Any) -> None:
    raw, fitted = io.StringIO(), io.StringIO()
    print_scored([scored("my card")], raw, layout)
    print_scored([scored("my card", calibrated=True)], fitted, layout)
    assert "uncalibrated" in raw.getvalue()
    assert "uncalibrated" not in fitted.getvalue()
    for out in (raw, fitted):
        assert "my card" in out.getvalue()
        assert "0.750" in out.getvalue()


def test_the_table_shows_the_next_labels_best_first() -> None:
    out = io.StringIO()
    assert print_scored([scored("one"), scored("two", probability=0.5)], out, "table") == 2
    assert "b 0.200, c 0.050" in out.getvalue()
    assert "c 0.300, b 0.200" in out.getvalue()


def test_texts_are_data_to_the_terminal_not_commands() -> None:
    out = io.StringIO()
    print_scored([scored("[red]x[/red] [/] \x1b[31mred\x07 \u202eback", label="[b]")], out, "table")
    assert "\x1b" not in out.getvalue()
    assert "[red]x[/red] [/]" in out.getvalue()
    assert "[b]" in out.getvalue()
    assert printable("a\r\n\tb\x1b[2J\u202e") == "a b [2J"


def test_no_rows_print_nothing_for_machines() -> None:
    out = io.StringIO()
    assert print_scored([], out, "json") == 0
    assert out.getvalue() == ""


# ------------------------------------------------------------------------------------------------------- finding the model


def test_the_model_is_looked_for_here_then_in_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"neither model\.onnx nor release/model\.onnx"):
        find_model(None)
    (tmp_path / "release").mkdir()
    write(tmp_path / "release/model.onnx", b"")
    assert find_model(None) == Path("release/model.onnx")
    write(tmp_path / "model.onnx", b"")
    assert find_model(None) == Path("model.onnx")
    assert find_model(Path("elsewhere.onnx")) == Path("elsewhere.onnx")
