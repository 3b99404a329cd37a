//! How messages of the API are written and read: as protobuf, in buffers that begin small. Most messages have a hundred bytes, and a daemon has a reply open for each session; the library's
//! own buffers have 8 KiB each from the start.

use std::marker::PhantomData;

use prost::Message;
use tonic::codec::{BufferSettings, Codec};
use tonic_prost::{ProstCodec, ProstDecoder, ProstEncoder};

/// Bytes of a buffer at its beginning.
const BEGINS_WITH: usize = 256;
/// A reply of several messages goes on its way when so many bytes of it are there: as the library has it.
const SENT_AT: usize = 32 << 10;

/// See above.
#[derive(Debug)]
pub(crate) struct SmallCodec<T, U>(PhantomData<(T, U)>);

impl<T, U> Default for SmallCodec<T, U> {
    fn default() -> Self {
        SmallCodec(PhantomData)
    }
}

impl<T, U> Codec for SmallCodec<T, U>
where
    T: Message + Send + 'static,
    U: Message + Default + Send + 'static,
{
    type Encode = T;
    type Decode = U;
    type Encoder = ProstEncoder<T>;
    type Decoder = ProstDecoder<U>;

    fn encoder(&mut self) -> Self::Encoder {
        ProstCodec::<T, U>::raw_encoder(BufferSettings::new(BEGINS_WITH, SENT_AT))
    }

    fn decoder(&mut self) -> Self::Decoder {
        ProstCodec::<T, U>::raw_decoder(BufferSettings::new(BEGINS_WITH, SENT_AT))
    }
}
