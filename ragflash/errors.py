"""Every error that ragflash raises on purpose.

RagflashError
├── InputError                  the caller sent something that cannot be served
│   ├── DocumentUnreadable      empty, encrypted, no_text, …: see ragflash_ingest
│   ├── DocumentTooLarge
│   ├── UnsupportedMedia
│   ├── UnsafeName
│   ├── QuestionBlank
│   ├── ContextTooLong
│   ├── ConstraintUnsupported
│   └── SettingInvalid
├── AccessDenied                no key, or a wrong one
├── NotFound                    absent, or outside the caller's scope: the same answer
├── Conflict
│   ├── DataFolderLocked
│   └── IndexMismatch           the collection was built with another embedding model
├── ModelError
│   ├── ModelMissing
│   ├── GGUFInvalid
│   │   └── UnsupportedTensorType
│   ├── ArchitectureUnknown
│   ├── TensorMissing
│   ├── DrafterIncomplete       a drafter's file does not say what it must
│   ├── TokenizerUnknown
│   └── TemplateInvalid
├── DeviceError                 a card cannot be used as it was asked to be
│   ├── DeviceMissing           there is none, or torch cannot use it
│   ├── DeviceUnsupported       too old a card, or too old a driver
│   └── DeviceMemoryShort       what was asked for does not fit
├── EngineError
│   ├── EngineOverloaded
│   ├── EngineDead
│   └── GenerationCancelled
├── StorageError                the disk or the database refused
└── UpstreamError
    └── VectorStoreUnavailable

`api.problems` alone knows HTTP; a test enumerates this tree against its table.
"""

from typing import ClassVar


class RagflashError(Exception):
    """Base of the tree.

    Attributes:
        code: Stable machine-readable name, part of the API.
        title: The same for every instance of a class; `str(error)` names the case at hand.
        retryable: Whether the same call can succeed later without a change.
    """

    code: ClassVar[str] = "internal_error"
    title: ClassVar[str] = "Something went wrong inside ragflash"
    retryable: ClassVar[bool] = False

    def __init__(self, detail: str) -> None:
        super().__init__(detail)
        self.detail = detail


class InputError(RagflashError):
    """The request cannot be served as it was sent."""

    code = "invalid_request"
    title = "The request is not valid"


class DocumentUnreadable(InputError):
    """A document holds nothing that can be read; `reason` says why in one word."""

    code = "document_unreadable"
    title = "The document cannot be read"

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class DocumentTooLarge(InputError):
    """More bytes than the configured limit."""

    code = "document_too_large"
    title = "The document is too large"


class UnsupportedMedia(InputError):
    """The bytes are of a type that no parser reads."""

    code = "unsupported_type"
    title = "This kind of file is not supported"


class UnsafeName(InputError):
    """A file name that cannot be shown or stored safely."""

    code = "unsafe_name"
    title = "The file name is not acceptable"


class QuestionBlank(InputError):
    """A question or query without a word in it."""

    code = "question_blank"
    title = "The question is blank"


class ContextTooLong(InputError):
    """Prompt and answer do not fit the model's context."""

    code = "context_length_exceeded"
    title = "The text does not fit the model's context"

    def __init__(self, detail: str, *, prompt_tokens: int = 0, limit_tokens: int = 0) -> None:
        super().__init__(detail)
        self.prompt_tokens = prompt_tokens
        self.limit_tokens = limit_tokens


class ConstraintUnsupported(InputError):
    """The engine cannot honour a constraint that the request demands."""

    code = "constraint_unsupported"
    title = "The engine cannot honour this constraint"


class SettingInvalid(InputError):
    """A setting or flag with a value that makes no sense."""

    code = "setting_invalid"
    title = "A setting is not valid"


class AccessDenied(RagflashError):
    """No API key was sent, or one that is not known."""

    code = "access_denied"
    title = "An API key is required"


class NotFound(RagflashError):
    """Absent or outside the caller's scope; the two cannot be told apart from outside."""

    code = "not_found"
    title = "Not found"


class Conflict(RagflashError):
    """The state of things does not allow the request."""

    code = "conflict"
    title = "The request conflicts with the current state"


class DataFolderLocked(Conflict):
    """Another process owns the data folder."""

    code = "data_folder_locked"
    title = "The data folder is in use by another process"
    retryable = True


class IndexMismatch(Conflict):
    """A collection's vectors come from another embedding model than the one configured."""

    code = "index_mismatch"
    title = "The collection was built with another embedding model"


class ModelError(RagflashError):
    """A model file cannot be used."""

    code = "model_error"
    title = "The model cannot be used"


class ModelMissing(ModelError):
    """No model file at the configured place."""

    code = "model_missing"
    title = "The model file is missing"


class GGUFInvalid(ModelError):
    """A GGUF file breaks the format; names the field and the byte offset."""

    code = "gguf_invalid"
    title = "The model file is damaged"

    def __init__(self, field: str, offset_bytes: int, detail: str) -> None:
        super().__init__(f"{field} at byte {offset_bytes}: {detail}")
        self.field = field
        self.offset_bytes = offset_bytes
        self.reason = detail


class UnsupportedTensorType(GGUFInvalid):
    """A tensor is in a block format that ragflash does not read, or of a type no format has."""

    code = "tensor_type_unsupported"
    title = "The model file uses an unsupported tensor type"


class ArchitectureUnknown(ModelError):
    """`general.architecture` names a model family that ragflash does not implement."""

    code = "architecture_unknown"
    title = "This model architecture is not supported"


class TensorMissing(ModelError):
    """A tensor that the architecture needs is absent or has the wrong shape."""

    code = "tensor_missing"
    title = "The model file lacks a tensor"


class DrafterIncomplete(ModelError):
    """A drafter's file does not say what it cannot be run without; `missing` names all of it."""

    code = "drafter_incomplete"
    title = "The drafter's file lacks a value"

    def __init__(self, detail: str, *, missing: tuple[str, ...] = ()) -> None:
        super().__init__(detail)
        self.missing = missing


class TokenizerUnknown(ModelError):
    """The file's tokenizer or pre-tokenizer is not one that ragflash knows."""

    code = "tokenizer_unknown"
    title = "The model's tokenizer is not supported"


class TemplateInvalid(ModelError):
    """The chat template is broken, or exceeds its limits."""

    code = "template_invalid"
    title = "The model's chat template cannot be used"


class DeviceError(RagflashError):
    """A card cannot be used as it was asked to be."""

    code = "device_error"
    title = "The graphics card cannot be used"


class DeviceMissing(DeviceError):
    """There is no card, or this build of torch has no support for it."""

    code = "device_missing"
    title = "There is no graphics card to run on"


class DeviceUnsupported(DeviceError):
    """The card, or its driver, is too old."""

    code = "device_unsupported"
    title = "This graphics card or its driver is too old"


class DeviceMemoryShort(DeviceError):
    """What was asked for does not fit the card; names settings that do."""

    code = "device_memory_short"
    title = "The model does not fit the graphics card"


class EngineError(RagflashError):
    """The engine could not carry out a request."""

    code = "engine_error"
    title = "The engine could not serve the request"


class EngineOverloaded(EngineError):
    """The request queue is full."""

    code = "overloaded"
    title = "Too many requests are waiting"
    retryable = True


class EngineDead(EngineError):
    """The worker thread has ended; nothing more can be served by this process."""

    code = "engine_dead"
    title = "The engine has stopped"
    retryable = True


class GenerationCancelled(EngineError):
    """The client went away or asked to stop."""

    code = "cancelled"
    title = "The request was cancelled"


class StorageError(RagflashError):
    """The disk or the database refused an operation."""

    code = "storage_error"
    title = "The data folder cannot be read or written"


class UpstreamError(RagflashError):
    """A service that ragflash depends on failed."""

    code = "upstream_error"
    title = "A required service failed"
    retryable = True


class VectorStoreUnavailable(UpstreamError):
    """The vector store does not answer."""

    code = "store_unavailable"
    title = "The vector store is unavailable"
