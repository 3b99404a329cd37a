//! Errors as they cross a process border: what can be done about them, and a text. On gRPC as a status, on the chunk socket as a `Refused`.

use tonic::{Code, Status};

use super::v1;
use crate::error::ErrorKind;

/// The gRPC code of a kind.
pub fn code_from_kind(kind: ErrorKind) -> Code {
    match kind {
        ErrorKind::Exhausted => Code::ResourceExhausted,
        ErrorKind::OverLimit => Code::OutOfRange,
        ErrorKind::Invalid => Code::InvalidArgument,
        ErrorKind::NotFound => Code::NotFound,
        ErrorKind::Conflict => Code::FailedPrecondition,
        ErrorKind::Unsupported => Code::Unimplemented,
        ErrorKind::Unavailable => Code::Unavailable,
        ErrorKind::Broken => Code::Internal,
    }
}

/// The kind of a gRPC code; what the daemon never sends counts as a broken or unreachable daemon.
pub fn kind_from_code(code: Code) -> ErrorKind {
    match code {
        Code::ResourceExhausted => ErrorKind::Exhausted,
        Code::OutOfRange => ErrorKind::OverLimit,
        Code::InvalidArgument => ErrorKind::Invalid,
        Code::NotFound => ErrorKind::NotFound,
        Code::FailedPrecondition | Code::AlreadyExists | Code::Aborted => ErrorKind::Conflict,
        Code::Unimplemented => ErrorKind::Unsupported,
        Code::Unavailable | Code::DeadlineExceeded | Code::Cancelled => ErrorKind::Unavailable,
        Code::PermissionDenied | Code::Unauthenticated => ErrorKind::Invalid,
        Code::Ok | Code::Unknown | Code::Internal | Code::DataLoss => ErrorKind::Broken,
    }
}

/// A status of this kind with this text.
pub fn status(kind: ErrorKind, message: impl Into<String>) -> Status {
    Status::new(code_from_kind(kind), message)
}

impl From<ErrorKind> for v1::ErrorKind {
    fn from(kind: ErrorKind) -> v1::ErrorKind {
        match kind {
            ErrorKind::Exhausted => v1::ErrorKind::Exhausted,
            ErrorKind::OverLimit => v1::ErrorKind::OverLimit,
            ErrorKind::Invalid => v1::ErrorKind::Invalid,
            ErrorKind::NotFound => v1::ErrorKind::NotFound,
            ErrorKind::Conflict => v1::ErrorKind::Conflict,
            ErrorKind::Unsupported => v1::ErrorKind::Unsupported,
            ErrorKind::Unavailable => v1::ErrorKind::Unavailable,
            ErrorKind::Broken => v1::ErrorKind::Broken,
        }
    }
}

impl From<v1::ErrorKind> for ErrorKind {
    fn from(kind: v1::ErrorKind) -> ErrorKind {
        match kind {
            v1::ErrorKind::Exhausted => ErrorKind::Exhausted,
            v1::ErrorKind::OverLimit => ErrorKind::OverLimit,
            v1::ErrorKind::Invalid => ErrorKind::Invalid,
            v1::ErrorKind::NotFound => ErrorKind::NotFound,
            v1::ErrorKind::Conflict => ErrorKind::Conflict,
            v1::ErrorKind::Unsupported => ErrorKind::Unsupported,
            v1::ErrorKind::Unavailable => ErrorKind::Unavailable,
            v1::ErrorKind::Broken | v1::ErrorKind::Unspecified => ErrorKind::Broken,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_survives_both_ways_of_crossing() {
        for kind in [
            ErrorKind::Exhausted,
            ErrorKind::OverLimit,
            ErrorKind::Invalid,
            ErrorKind::NotFound,
            ErrorKind::Conflict,
            ErrorKind::Unsupported,
            ErrorKind::Unavailable,
            ErrorKind::Broken,
        ] {
            assert_eq!(kind_from_code(code_from_kind(kind)), kind);
            assert_eq!(ErrorKind::from(v1::ErrorKind::from(kind)), kind);
        }
    }
}
