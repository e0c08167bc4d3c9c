"""The server decides every byte of a message to a node: memory and log of the node stay small."""

import re
import tracemalloc
import types

import grpc
import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import ArrayRecord as ArrayRecordMessage
from flwr.proto.recorddict_pb2 import RecordDict as RecordDictMessage

from deployment_world import deployment_of
from nights import by_night
from rounds import make_plan
from run_world import LIMIT, peak_bytes, wait_until
from shufl.clients import RoundRefused
from shufl.clients.node_process import _Reader
from shufl.clients.node_round import Announcement, Question
from shufl.deploy.node import node_settings
from shufl.deploy.rehearse import Rehearsal
from shufl.deploy.site_files import NodeSite, load_site

FORGED = "x\n2026-11-25 12:00:00,000 INFO forged\r\x1b[2Jforged\x9b2J\u202eforged\u2028forged"
OTHER = make_plan(
    users=10**12, noise_multiplier=1.2345678901, clip_norm=2.345678901, check_in_rate=1e-3,
    rounds=10**5, delta=1.2345678901e-5, target_epsilon=9.87654321, minimum_batch=3,
    adjacency="zero-out", shuffler_blankets=1234.5678901, accountant="crowd",
).to_json()  # fmt: skip
"""A plan whose keys all differ, in many digits."""
EVENT = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (INFO|WARNING|ERROR) [ -~…]*")


class Device:
    """The real process of a node of a deployment, without Flower, and its socket."""

    def __init__(self, folder):
        self.rehearsal = Rehearsal(deployment_of(folder, 1, 2), folder, folder / "s")
        self.site = self.rehearsal.folder / "ward-1"
        self.log = self.site / "node.out"
        self.rehearsal.start("shuffler-1", "shuffler")  # which knows no run
        self.rehearsal.start("ward-1", "node")
        wait_until(lambda: "listening on" in self.log.read_text(), 90, "the node")
        self.pid = self.rehearsal.running["ward-1", "node"].pid
        settings = node_settings(load_site(self.site / "node.toml", NodeSite), self.site)
        self.question = {"run_id": "a run", "plan_digest": settings.plan.digest()}
        self.round = {**self.question, "round": 1, "public_key": b"k" * 32, "seconds": 30.0}
        self.model = ArrayRecord(settings.make_model().state_dict())

    def call(self, kind, message):
        """The code and the details of a refusal; of an answer `OK`."""
        if isinstance(message, dict):
            message = recorddict_to_proto(RecordDict(message)).SerializeToString()
        with grpc.insecure_channel(f"unix:{self.site}/node.sock") as channel:
            try:
                answer = channel.unary_unary(f"/shufl.Device/{kind}")(message, timeout=LIMIT)
            except grpc.RpcError as error:
                return error.code().name, error.details()
        said = recorddict_from_proto(RecordDictMessage.FromString(answer))
        return "OK", str(dict(said["acknowledgement"]))


@pytest.fixture(scope="module")
def device(tmp_path_factory):
    device = Device(tmp_path_factory.mktemp("d"))
    with_all = {"model": device.model, "round": ConfigRecord(device.round)}
    assert device.call("query", {"round": ConfigRecord(device.question)})[0] == "OK"
    code, details = device.call("train", with_all)  # all that a round needs has been loaded
    assert (code, "shuffler does not confirm" in details) == ("FAILED_PRECONDITION", True)
    yield device
    device.rehearsal.__exit__()


@pytest.mark.slow
@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, *by_night(None)])
@pytest.mark.parametrize("kind", ["query", "train"])
def test_a_digest_of_20_megabytes_is_refused_before_it_is_read(device, kind, compression):
    before, log = peak_bytes(device.pid, anew=True), device.log.stat().st_size
    fields = device.question if kind == "query" else device.round
    message = {"round": ConfigRecord(fields | {"plan_digest": "f" * (2 * 10**7)})}
    content = recorddict_to_proto(RecordDict(message)).SerializeToString()
    with grpc.insecure_channel(f"unix:{device.site}/node.sock") as channel:
        call = channel.unary_unary(f"/shufl.Device/{kind}")
        with pytest.raises(grpc.RpcError) as refused:
            call(content, timeout=LIMIT, compression=compression)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert peak_bytes(device.pid) - before < 8e6
    assert device.log.stat().st_size == log


def with_two(record, model, fields):
    """A message that has two records of a name, or two arrays, or two values."""
    message = recorddict_to_proto(RecordDict({"model": model, "round": ConfigRecord(fields)}))
    items = {item.key: item for item in message.items}
    within = {
        "record": message.items,
        "array": items["model"].array_record.items,
        "value": items["round"].config_record.items,
    }[record]
    within.append(within[-1])
    return message.SerializeToString()


def many_records(number):
    """Records without a name or a value, each of which has two bytes."""
    return b"\x0a\x00" * number


def many_arrays(number):
    """A model of arrays without a name or a value, each of which has two bytes."""
    message = RecordDictMessage()
    message.items.add(key="model").array_record.MergeFromString(many_records(number))
    return message.SerializeToString()


def declares(shape, model):
    """The model, the first of whose arrays says that it has another shape."""
    message = recorddict_to_proto(RecordDict({"model": model})).items[0].array_record
    changed = ArrayRecordMessage.FromString(message.SerializeToString())
    array = changed.items[0].value
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    array.data = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode()
    items = RecordDictMessage()
    items.items.add(key="model").array_record.CopyFrom(changed)
    return recorddict_from_proto(items)["model"]


@pytest.mark.slow
def test_nothing_that_a_server_says_forges_a_line_of_the_log_or_makes_it_long(device):
    start, before = device.log.stat().st_size, peak_bytes(device.pid, anew=True)
    model, question, round = device.model, device.question, device.round
    own = model.to_torch_state_dict()
    longer = ArrayRecord(own | {"w\x1b" + "n" * 9000: torch.zeros(1)})
    changed_questions = (
        {"run_id": FORGED}, {"run_id": "r" * 10_000}, {"plan_digest": FORGED}, {FORGED: 1},
        {"plan_digest": "0" * 10_000}, {"plan_digest": ["0" * 64] * 100}, {"plan": "0" * 10_000},
        *({"plan_digest": "0" * 64, "plan": each} for each in (FORGED, "[" * 4000, OTHER)),
    )  # fmt: skip
    changed_rounds = (
        {"run_id": FORGED}, {"public_key": b"k" * 10_000}, {"public_key": FORGED}, {"round": -1},
        {"seconds": float("nan")}, {"round": 2**63 - 1},
    )  # fmt: skip
    queries = [
        *({"round": ConfigRecord(question | changes)} for changes in changed_questions),
        {"round": ConfigRecord(question), FORGED: ConfigRecord({})},
        *({"round": model}, {"model": model}, {}, b"\xff" * 100),
        *(many_records(15_000), many_arrays(15_000), with_two("value", model, question)),
    ]
    trains = [
        *({"model": model, "round": ConfigRecord(round | changes)} for changes in changed_rounds),
        {"round": ConfigRecord(round)},
        {"model": ConfigRecord({FORGED: FORGED}), "round": ConfigRecord(round)},
        {"model": model, "round": ConfigRecord(round), FORGED: ConfigRecord({})},
        {"model": longer, "round": ConfigRecord(round)},
        *(with_two(each, model, round) for each in ("record", "array", "value")),
        *(
            {"model": declares(shape, model), "round": ConfigRecord(round)}
            for shape in ("(1000000000, 64)", "(99999999999999,)", "-1", "(" * 50)
        ),
    ]
    refused = [("query", each) for each in queries] + [("train", each) for each in trains]
    for kind, message in refused:
        code, details = device.call(kind, message)
        assert code == "FAILED_PRECONDITION", (kind, message, details)
        assert details.isprintable() and len(details) < 400, details
    assert device.call("query", {"round": ConfigRecord(question)})[0] == "OK"
    with device.log.open(encoding="utf-8", newline="\n") as log:
        log.seek(start)
        lines = log.read().removesuffix("\n").split("\n")
    assert len(lines) == len(refused)
    assert [line for line in lines if not EVENT.fullmatch(line) or len(line) > 500] == []
    assert "forged" not in "".join(lines)
    assert peak_bytes(device.pid) - before < 8e6


GOOD = {
    "run_id": "0f-Z [a.b] 3",
    "round": 1,
    "plan_digest": "0" * 64,
    "public_key": bytes(1216),
    "seconds": 1.0,
}


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        *(("run_id", text) for text in ("", "a\n", "\na", "a\x7f", "ä", "a" * 257, b"a")),
        *(("plan_digest", text) for text in ("", "0" * 63, "0" * 65, "A" * 64, "0" * 64 + "\n")),
        *(("public_key", key) for key in (bytes(1217), "k" * 32)),
        *(("round", number) for number in (-1, 2**63, 1.0, True)),
        *(("seconds", number) for number in (0.0, float("inf"), float("nan"), 1e10)),
        ("more", 1),
    ],
)
def test_what_a_server_names_has_a_form_and_a_length(name, wrong):
    assert Announcement.read(GOOD).run_id == GOOD["run_id"]
    asked = {key: GOOD[key] for key in ("run_id", "plan_digest")}
    assert Question.read(asked).plan_digest == "0" * 64
    with pytest.raises(RoundRefused, match=r"^the round's announcement is malformed$"):
        Announcement.read(GOOD | {name: wrong})
    if name in ("run_id", "plan_digest", "more"):
        with pytest.raises(RoundRefused, match=r"^the run's announcement is malformed$"):
            Question.read(asked | {name: wrong})


def test_a_record_of_arrays_is_no_question():
    with pytest.raises(RoundRefused, match="the run's announcement is malformed"):
        Question.read(ArrayRecord([np.zeros(3)]))


def many_values(number):
    """A record of values without a name or a value, each of which has two bytes."""
    message = RecordDictMessage()
    message.items.add(key="round").config_record.MergeFromString(many_records(number))
    return message.SerializeToString()


@pytest.mark.parametrize("make", [many_records, many_arrays, many_values])
def test_thousands_of_nothings_are_counted_before_they_are_read(make):
    """Each would be an object of hundreds of bytes, and all together fill a machine."""
    reader = _Reader(types.SimpleNamespace(make_model=lambda: torch.nn.Linear(1000, 1000)))
    request = make(500_000)
    assert len(request) < reader.most_bytes
    tracemalloc.start()
    try:
        with pytest.raises(RoundRefused, match="the message is malformed"):
            reader.read(request)
        assert tracemalloc.get_traced_memory()[1] < 2e6
    finally:
        tracemalloc.stop()
