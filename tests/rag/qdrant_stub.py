"""A Qdrant server's REST interface over the embedded engine, on loopback, with faults to order.

It answers what the driver asks for, in the shapes of `qdrant_client.models`, as strictly as a
server in strict mode: bodies are bounded, and a filter on a field without an index is refused.
"""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import qdrant_edge as edge
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from qdrant_client import models

MAX_BODY_BYTES = 5_000_000
KEYWORD = models.PayloadSchemaType.KEYWORD


class Fault(StrEnum):
    """What can go wrong on the way; `LOST_REPLY` does the work first."""

    UNAVAILABLE = "503"
    NO_ANSWER = "no answer"
    CUT = "cut"
    LOST_REPLY = "lost reply"


@dataclass
class Collection:
    shard: edge.EdgeShard
    params: models.CollectionParams
    fields: set[str] = field(default_factory=set)


@dataclass
class QdrantStub:
    """The server's state, and what a test wants to know of it or do to it."""

    folder: Path
    api_key: str | None = None
    url: str = ""
    collections: dict[str, Collection] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    requests: list[tuple[str, str, int]] = field(default_factory=list)  # method, path, body bytes
    stopped: threading.Event = field(default_factory=threading.Event)

    def order(self, fault: Fault, times: int = 1) -> None:
        """Have the next requests fail, and forget the earlier ones."""
        self.faults += [fault] * times
        self.requests.clear()

    def bodies(self, path_end: str) -> list[int]:
        return [size for _, path, size in self.requests if path.endswith(path_end)]

    def reset(self) -> None:
        for name in list(self.collections):
            self.drop(name)
        self.faults.clear()
        self.requests.clear()
        self.api_key = None

    def drop(self, name: str) -> bool:
        held = self.collections.pop(name, None)
        if held is not None:
            held.shard.close()
        return held is not None

    def get(self, name: str) -> Collection:
        if name not in self.collections:
            raise HTTPException(404, f"Not found: Collection `{name}` doesn't exist!")
        return self.collections[name]


class Gate:
    """ASGI: faults, key and size of the body, before any route."""

    def __init__(self, app, stub: QdrantStub) -> None:
        self._app, self._stub = app, stub

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = await Request(scope, receive).body()
        self._stub.requests.append((scope["method"], scope["path"], len(body)))
        fault = self._stub.faults.pop(0) if self._stub.faults else None
        if fault is Fault.NO_ANSWER:
            await asyncio.to_thread(self._stub.stopped.wait, 30)
        if fault is Fault.LOST_REPLY:
            await self._answer(scope, body, _swallow)
        if fault in {Fault.CUT, Fault.LOST_REPLY, Fault.NO_ANSWER}:
            await send(
                {
                    "type": "http.response.start",
                    "status": 200,
                    "headers": [(b"content-length", b"9")],
                }
            )
            await send({"type": "http.response.body", "body": b"{"})  # uvicorn cuts the connection
            return
        refusal = self._refuse(scope, body, fault)
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        await self._answer(scope, body, send)

    def _refuse(self, scope, body: bytes, fault: Fault | None) -> JSONResponse | None:
        if fault is Fault.UNAVAILABLE:
            return error(503, "Service unavailable: overloaded")
        sent = dict(scope["headers"]).get(b"api-key", b"").decode()
        if self._stub.api_key is not None and sent != self._stub.api_key:
            return error(401, "Must provide an API key or an Authorization bearer token")
        if len(body) > MAX_BODY_BYTES:
            return error(413, f"Payload too large: over {MAX_BODY_BYTES} bytes")
        return None

    async def _answer(self, scope, body: bytes, send) -> None:
        async def receive():
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, receive, send)


async def _swallow(message) -> None:
    pass


def error(status: int, text: str) -> JSONResponse:
    return JSONResponse({"status": {"error": text}, "time": 0.0}, status)


def reply(result) -> dict:
    return {"result": result, "status": "ok", "time": 0.0}


def done() -> dict:
    return reply({"operation_id": 1, "status": "completed"})


def create_app(stub: QdrantStub) -> FastAPI:
    app = FastAPI()
    app.add_exception_handler(
        HTTPException, lambda _, fault: error(fault.status_code, fault.detail)
    )
    app.add_exception_handler(Engine, lambda _, fault: error(400, f"Wrong input: {fault}"))
    add_collection_routes(app, stub)
    add_write_routes(app, stub)
    add_counting_routes(app, stub)
    add_reading_routes(app, stub)
    app.add_middleware(Gate, stub=stub)
    return app


class Engine(Exception):
    """The embedded engine refused."""


@contextmanager
def engine() -> Iterator[None]:
    try:
        yield
    except HTTPException:
        raise
    except Exception as fault:
        raise Engine(str(fault)) from fault


def add_collection_routes(app: FastAPI, stub: QdrantStub) -> None:
    @app.get("/collections/{name}/exists")
    def exists(name: str):
        return reply({"exists": name in stub.collections})

    @app.put("/collections/{name}")
    def create(name: str, body: models.CreateCollection):
        if name in stub.collections:
            raise HTTPException(409, f"Wrong input: Collection `{name}` already exists!")
        vectors = {
            key: edge.EdgeVectorParams(size=value.size, distance=edge.Distance.Cosine)
            for key, value in body.vectors.items()
        }
        sparse = {key: edge.EdgeSparseVectorParams() for key in body.sparse_vectors or {}}
        folder = stub.folder / f"{len(list(stub.folder.iterdir()))}-{name}"
        folder.mkdir()
        config = edge.EdgeConfig(vectors=vectors, sparse_vectors=sparse)
        params = models.CollectionParams(vectors=body.vectors, sparse_vectors=body.sparse_vectors)
        stub.collections[name] = Collection(edge.EdgeShard.create(str(folder), config), params)
        return reply(True)

    @app.get("/collections/{name}")
    def describe(name: str):
        held = stub.get(name)
        info = models.CollectionInfo(
            status=models.CollectionStatus.GREEN,
            optimizer_status=models.OptimizersStatusOneOf.OK,
            segments_count=1,
            config=models.CollectionConfig(
                params=held.params,
                hnsw_config=models.HnswConfig(m=16, ef_construct=100, full_scan_threshold=10000),
                optimizer_config=models.OptimizersConfig(
                    deleted_threshold=0.2,
                    vacuum_min_vector_number=1000,
                    default_segment_number=0,
                    flush_interval_sec=5,
                ),
            ),
            payload_schema={
                key: models.PayloadIndexInfo(data_type=KEYWORD, points=0) for key in held.fields
            },
        )
        return reply(info.model_dump(mode="json", exclude_none=True))

    @app.delete("/collections/{name}")
    def drop(name: str):
        return reply(stub.drop(name))

    @app.put("/collections/{name}/index")
    def index(name: str, body: models.CreateFieldIndex):
        held = stub.get(name)
        assert body.field_schema == KEYWORD
        held.shard.update(
            edge.UpdateOperation.create_field_index(body.field_name, edge.PayloadSchemaType.Keyword)
        )
        held.fields.add(body.field_name)
        return done()


def add_write_routes(app: FastAPI, stub: QdrantStub) -> None:
    @app.put("/collections/{name}/points")
    def upsert(name: str, body: models.PointsList, wait: bool = False):
        assert wait
        batch = [
            edge.Point(
                point.id,
                {key: to_edge_vector(value) for key, value in point.vector.items()},
                point.payload,
            )
            for point in body.points
        ]
        with engine():
            stub.get(name).shard.update(edge.UpdateOperation.upsert_points(batch))
        return done()

    @app.post("/collections/{name}/points/delete")
    def delete(name: str, body: models.FilterSelector, wait: bool = False):
        assert wait
        held = stub.get(name)
        scope = to_edge_filter(body.filter, held.fields)
        held.shard.update(edge.UpdateOperation.delete_points_by_filter(scope))
        return done()


def add_counting_routes(app: FastAPI, stub: QdrantStub) -> None:
    @app.post("/collections/{name}/points/count")
    def count(name: str, body: models.CountRequest):
        held = stub.get(name)
        scope = to_edge_filter(body.filter, held.fields)
        counted = held.shard.count(edge.CountRequest(exact=body.exact, filter=scope))
        return reply({"count": counted})

    @app.post("/collections/{name}/facet")
    def facet(name: str, body: models.FacetRequest):
        held = stub.get(name)
        check_indexed(body.key, held.fields)
        scope = to_edge_filter(body.filter, held.fields)
        found = held.shard.facet(
            edge.FacetRequest(key=body.key, limit=body.limit, exact=body.exact, filter=scope)
        )
        return reply({"hits": [{"value": hit.value, "count": hit.count} for hit in found.hits]})


def add_reading_routes(app: FastAPI, stub: QdrantStub) -> None:
    @app.post("/collections/{name}/points/query")
    def query(name: str, body: models.QueryRequest):
        held = stub.get(name)
        assert isinstance(body.query, models.NearestQuery)
        near = edge.Query.Nearest(to_edge_vector(body.query.nearest), using=body.using)
        request = edge.QueryRequest(
            limit=body.limit,
            query=near,
            filter=to_edge_filter(body.filter, held.fields),
            with_payload=True,
        )
        with engine():
            found = held.shard.query(request)
        points = [
            {"id": str(hit.id), "version": hit.version, "score": hit.score, "payload": hit.payload}
            for hit in found
        ]
        return reply({"points": points})

    @app.post("/collections/{name}/points/scroll")
    def scroll(name: str, body: models.ScrollRequest):
        held = stub.get(name)
        records, following = held.shard.scroll(
            edge.ScrollRequest(
                offset=body.offset,
                limit=body.limit,
                filter=to_edge_filter(body.filter, held.fields),
                with_payload=True,
                with_vector=body.with_vector,
            )
        )
        points = [
            {"id": str(record.id), "payload": record.payload, "vector": to_json(record.vector)}
            for record in records
        ]
        return reply(
            {"points": points, "next_page_offset": None if following is None else str(following)}
        )


def to_edge_vector(value):
    if isinstance(value, models.SparseVector):
        return edge.SparseVector(value.indices, value.values)
    return value


def to_json(vectors):
    return {
        key: {"indices": value.indices, "values": value.values}
        if isinstance(value, edge.SparseVector)
        else value
        for key, value in vectors.items()
    }


def to_edge_filter(scope: models.Filter | None, fields: set[str]) -> edge.Filter | None:
    if scope is None:
        return None
    must, must_not = (
        [to_edge_condition(condition, fields) for condition in conditions or []]
        for conditions in (scope.must, scope.must_not)
    )
    return edge.Filter(must=must, must_not=must_not)


def to_edge_condition(condition: models.Condition, fields: set[str]):
    if isinstance(condition, models.HasIdCondition):
        return edge.HasIdCondition(set(condition.has_id))
    assert isinstance(condition, models.FieldCondition)
    check_indexed(condition.key, fields)
    if isinstance(condition.match, models.MatchAny):
        return edge.FieldCondition(condition.key, match=edge.MatchAny(condition.match.any))
    return edge.FieldCondition(condition.key, match=edge.MatchValue(condition.match.value))


def check_indexed(key: str, fields: set[str]) -> None:
    if key not in fields:
        raise HTTPException(400, f"Bad request: Index required but not found for {key}")


@contextmanager
def running(folder: Path) -> Iterator[QdrantStub]:
    """Serve on a free port of loopback, in a thread, until the block ends."""
    stub = QdrantStub(folder)
    config = uvicorn.Config(
        create_app(stub), host="127.0.0.1", port=0, log_config=None, timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    listener = config.bind_socket()
    stub.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield stub
    finally:
        stub.stopped.set()
        server.should_exit = True
        thread.join(30)
        listener.close()
        stub.reset()
