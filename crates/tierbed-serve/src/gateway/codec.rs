//! Messages of calls to shards, coded as gRPC does.

use std::marker::PhantomData;

use prost::Message;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::Status;

/// Sends `Q`, and receives `A`.
#[derive(Debug)]
pub(super) struct Pair<Q, A>(PhantomData<(Q, A)>);

impl<Q, A> Default for Pair<Q, A> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<Q: Message + Send + 'static, A: Message + Default + Send + 'static> Codec for Pair<Q, A> {
    type Encode = Q;
    type Decode = A;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self::default()
    }

    fn decoder(&mut self) -> Self {
        Self::default()
    }
}

impl<Q: Message, A> Encoder for Pair<Q, A> {
    type Item = Q;
    type Error = Status;

    fn encode(&mut self, message: Q, out: &mut EncodeBuf<'_>) -> Result<(), Status> {
        message.encode(out).map_err(|cause| Status::internal(cause.to_string()))
    }
}

impl<Q, A: Message + Default> Decoder for Pair<Q, A> {
    type Item = A;
    type Error = Status;

    fn decode(&mut self, bytes: &mut DecodeBuf<'_>) -> Result<Option<A>, Status> {
        A::decode(bytes).map(Some).map_err(|cause| Status::internal(cause.to_string()))
    }
}
