"""Strict YAML documents: what is refused, and the one-line reason with what would be right."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, ValidationError

from decoding.documents.strict_yaml import Document, dump, read_mapping, suggest, validate
from decoding.errors import ProfileError


class Cat(Document):
    kind: Literal["cat"] = "cat"
    lives: int = Field(9, ge=1)


class Dog(Document):
    kind: Literal["dog"] = "dog"
    tricks: tuple[str, ...] = ()


class Owner(Document):
    name: str
    address: dict[str, str] = Field(default_factory=dict)


class Household(Document):
    schema_: Literal["v1"] = Field("v1", alias="schema")
    owner: Owner
    pet: Annotated[Cat | Dog, Field(discriminator="kind")] = Cat()
    rooms: tuple[int, ...] = ()


def check(data: Any) -> Household:
    return validate(Household, data, source="home.yaml", error=ProfileError)


def complaint(data: Any) -> str:
    with pytest.raises(ProfileError) as caught:
        check(data)
    message = str(caught.value)
    assert message.startswith("home.yaml: ")
    assert "\n" not in message
    return message.removeprefix("home.yaml: ")


def read(path: Path) -> dict[str, Any]:
    return read_mapping(path, what="profile", error=ProfileError)


def unreadable(path: Path) -> str:
    with pytest.raises(ProfileError) as caught:
        read(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- reading ------------------------------------------------------------------------------------------------------------


def test_mapping_is_read_as_written(tmp_path: Path) -> None:
    path = tmp_path / "home.yaml"
    path.write_text("owner: {name: Ädä}\nrooms: [1, 2]\n", encoding="utf-8")
    assert read(path) == {"owner": {"name": "Ädä"}, "rooms": [1, 2]}


def test_missing_file_is_named(tmp_path: Path) -> None:
    assert unreadable(tmp_path / "none.yaml") == f"no such profile: {tmp_path / 'none.yaml'}"


def test_folder_is_refused(tmp_path: Path) -> None:
    assert unreadable(tmp_path).startswith(f"cannot read the profile {tmp_path}: ")


def test_broken_yaml_is_refused_in_one_line(tmp_path: Path) -> None:
    for content in ("a: [1, 2", "a: b: c", "\tx: 1", "a: *nothing"):
        path = tmp_path / "home.yaml"
        path.write_text(content)
        assert "is not valid YAML" in unreadable(path)


def test_duplicate_key_is_refused(tmp_path: Path) -> None:
    for content in ("a: 1\nb: 2\na: 3\n", "x: {a: 1, a: 2}\n"):
        path = tmp_path / "home.yaml"
        path.write_text(content)
        assert "duplicate key 'a'" in unreadable(path)


def test_document_that_is_not_a_mapping_is_refused(tmp_path: Path) -> None:
    for content, kind in (("[1, 2]", "list"), ("just words", "str"), ("", "NoneType")):
        path = tmp_path / "home.yaml"
        path.write_text(content)
        assert unreadable(path).endswith(f"must be a mapping of keys to values, got {kind}")


def test_tags_that_would_run_code_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "home.yaml"
    path.write_text("a: !!python/object/apply:os.getcwd []\n")
    assert "is not valid YAML" in unreadable(path)


# --- validating -----------------------------------------------------------------------------------------------------------


def test_missing_key_is_named_with_its_location() -> None:
    assert complaint({}) == "key 'owner' is missing"
    assert complaint({"owner": {}}) == "key 'owner.name' is missing"


def test_unknown_key_is_named_with_the_nearest_and_all_known() -> None:
    assert (
        complaint({"owner": {"name": "Ada"}, "room": []})
        == "unknown key 'room'; did you mean 'rooms'? valid: owner, pet, rooms, schema"
    )
    assert complaint({"owner": {"name": "Ada", "nmae": "B"}}) == (
        "unknown key 'owner.nmae'; did you mean 'name'? valid: address, name"
    )


def test_unknown_key_in_a_variant_is_told_the_keys_of_that_variant() -> None:
    message = complaint({"owner": {"name": "Ada"}, "pet": {"kind": "dog", "lives": 3}})
    assert message == "unknown key 'pet.lives'; valid: kind, tricks"


def test_unknown_variant_is_told_the_known_ones() -> None:
    message = complaint({"owner": {"name": "Ada"}, "pet": {"kind": "cta"}})
    assert message == "pet.kind: unknown value 'cta'; did you mean 'cat'? valid: cat, dog"


def test_wrong_value_is_shown_with_what_would_be_right() -> None:
    message = complaint({"owner": {"name": "Ada"}, "pet": {"kind": "cat", "lives": 0}})
    assert message == "pet.lives: input should be greater than or equal to 1 (got 0)"
    message = complaint({"owner": {"name": "Ada"}, "rooms": [1, "two"]})
    assert message.startswith("rooms.1: input should be a valid integer")
    assert "'two'" in message


def test_documents_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Owner(name="Ada").name = "Bob"


# --- writing --------------------------------------------------------------------------------------------------------------


def test_dumped_document_reads_back_the_same(tmp_path: Path) -> None:
    home = check({"owner": {"name": "Ädä: x"}, "pet": {"kind": "dog", "tricks": ["sit", "no"]}, "rooms": [3, 1]})
    path = tmp_path / "home.yaml"
    path.write_text(dump(home), encoding="utf-8")
    assert check(read(path)) == home


def test_dump_keeps_key_order_and_puts_innermost_collections_on_one_line() -> None:
    lines = dump(check({"owner": {"name": "Ada"}, "rooms": [1, 2]})).splitlines()
    assert lines == [
        "schema: v1",
        "owner:",
        "  name: Ada",
        "  address: {}",
        "pet: {kind: cat, lives: 9}",
        "rooms: [1, 2]",
    ]


def test_suggestion_lists_what_is_valid_and_the_nearest_first() -> None:
    assert suggest("fixd", ["ada_edl", "fixed"]) == "did you mean 'fixed'? valid: ada_edl, fixed"
    assert suggest("zzz", ["b", "a"]) == "valid: a, b"
