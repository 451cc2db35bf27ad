"""Topology files, and what is said about bad ones."""

from pathlib import Path

import pytest

from services.cli.files import FileError, load

CLUSTER = """\
kind: Cluster
name: rome
podPrefixes: [10.200.0.0/16]
internalPrefixes: [10.80.0.0/16]
"""


def write(folder: Path, text: str) -> Path:
    file = folder / "topology.yaml"
    file.write_text(text)
    return file


def test_documents_lists_and_json_are_read_in_order(tmp_path: Path):
    node = '{"kind": "Node", "cluster": "rome", "name": "%s", "addresses": ["172.18.0.11"]}'
    file = write(tmp_path, f"{CLUSTER}---\n[{node % 'w1'}, {node % 'w2'}]\n---\n")
    assert [item.ref for item in load([file])] == ["Cluster/rome/rome", "Node/rome/w1", "Node/rome/w2"]


def test_the_example_is_good():
    assert len(load([Path("examples/two-clusters.yaml")])) == 13


@pytest.mark.parametrize(
    "text, complaint",
    [
        (
            f"{CLUSTER}---\nkind: Node\nname: w1\ncluster: rome\naddresses: [172.18.0.300]\n",
            r"topology.yaml: document 2 \(Node w1\): \$\.addresses\[0\]: ",
        ),
        (f"{CLUSTER}colour: red\n", r"document 1 \(Cluster rome\): .*colour"),
        (f"{CLUSTER}---\njust words\n", "document 2: expected an object"),
        ("kind: [", "not valid YAML"),
    ],
)
def test_a_bad_file_is_named_with_document_and_field(tmp_path: Path, text: str, complaint: str):
    with pytest.raises(FileError, match=complaint):
        load([write(tmp_path, text)])


def test_a_missing_file_is_said_so(tmp_path: Path):
    with pytest.raises(FileError, match="No such file"):
        load([tmp_path / "none.yaml"])
