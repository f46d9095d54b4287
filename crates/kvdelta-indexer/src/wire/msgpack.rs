//! A cursor over MessagePack that allocates nothing and does not recurse.
//!
//! [`Cursor::value`] measures a value and everything in it before anyone reads it, so that every length
//! that is read later is one that the bytes really hold.

use rmp::Marker;
use rmp::decode::{read_array_len, read_bin_len, read_f64, read_int, read_map_len, read_str_len};

/// Bytes that are still to be read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cursor<'a>(&'a [u8]);

impl<'a> Cursor<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// Cuts off the next value, whole. `None`: it is cut short, or no MessagePack.
    pub(super) fn value(&mut self) -> Option<&'a [u8]> {
        let start = self.0;
        let mut pending: u64 = 1;
        while pending > 0 {
            pending -= 1;
            let mut rest = self.0.get(1..)?;
            let (bytes, values): (u64, u64) = match Marker::from_u8(*self.0.first()?) {
                Marker::Reserved => return None,
                Marker::Null | Marker::True | Marker::False => (0, 0),
                Marker::FixPos(_) | Marker::FixNeg(_) => (0, 0),
                Marker::U8 | Marker::I8 => (1, 0),
                Marker::U16 | Marker::I16 => (2, 0),
                Marker::U32 | Marker::I32 | Marker::F32 => (4, 0),
                Marker::U64 | Marker::I64 | Marker::F64 => (8, 0),
                Marker::FixStr(len) => (len.into(), 0),
                Marker::Str8 | Marker::Bin8 => (length(&mut rest, 1)?, 0),
                Marker::Str16 | Marker::Bin16 => (length(&mut rest, 2)?, 0),
                Marker::Str32 | Marker::Bin32 => (length(&mut rest, 4)?, 0),
                Marker::Ext8 => (length(&mut rest, 1)? + 1, 0),
                Marker::Ext16 => (length(&mut rest, 2)? + 1, 0),
                Marker::Ext32 => (length(&mut rest, 4)? + 1, 0),
                Marker::FixExt1 => (2, 0),
                Marker::FixExt2 => (3, 0),
                Marker::FixExt4 => (5, 0),
                Marker::FixExt8 => (9, 0),
                Marker::FixExt16 => (17, 0),
                Marker::FixArray(len) => (0, len.into()),
                Marker::Array16 => (0, length(&mut rest, 2)?),
                Marker::Array32 => (0, length(&mut rest, 4)?),
                Marker::FixMap(len) => (0, 2 * u64::from(len)),
                Marker::Map16 => (0, 2 * length(&mut rest, 2)?),
                Marker::Map32 => (0, 2 * length(&mut rest, 4)?),
            };
            self.0 = rest.get(usize::try_from(bytes).ok()?..)?;
            pending += values;
            // Every value takes a byte, so a header that promises more is a lie: stop here.
            if pending > u64::try_from(self.0.len()).ok()? {
                return None;
            }
        }
        start.get(..start.len() - self.0.len())
    }

    /// Enters an array: its length.
    pub(super) fn array(&mut self) -> Option<usize> {
        self.read(|rest| read_array_len(rest).ok())
            .and_then(|len| usize::try_from(len).ok())
    }

    /// Enters a map: its length, in pairs.
    pub(super) fn map(&mut self) -> Option<usize> {
        self.read(|rest| read_map_len(rest).ok())
            .and_then(|len| usize::try_from(len).ok())
    }

    /// A string.
    pub(super) fn text(&mut self) -> Option<&'a str> {
        let mut rest = self.0;
        let len = usize::try_from(read_str_len(&mut rest).ok()?).ok()?;
        let text = std::str::from_utf8(rest.get(..len)?).ok()?;
        self.0 = rest.get(len..)?;
        Some(text)
    }

    /// Bytes.
    pub(super) fn bytes(&mut self) -> Option<&'a [u8]> {
        let mut rest = self.0;
        let len = usize::try_from(read_bin_len(&mut rest).ok()?).ok()?;
        let bytes = rest.get(..len)?;
        self.0 = rest.get(len..)?;
        Some(bytes)
    }

    /// An integer that is not negative.
    pub(super) fn unsigned(&mut self) -> Option<u64> {
        self.read(|rest| read_int(rest).ok())
    }

    /// An integer of 64 bits, signed or not, as its bits.
    pub(super) fn bits(&mut self) -> Option<u64> {
        self.unsigned().or_else(|| {
            self.read(|rest| read_int::<i64, _>(rest).ok())
                .map(i64::cast_unsigned)
        })
    }

    /// A number of seconds.
    pub(super) fn seconds(&mut self) -> Option<f64> {
        self.read(|rest| read_f64(rest).ok()).or_else(|| {
            self.unsigned()
                .and_then(|whole| u32::try_from(whole).ok())
                .map(f64::from)
        })
    }

    /// Whether the next value is a nil.
    pub(super) fn is_nil(&self) -> bool {
        self.marker() == Some(Marker::Null)
    }

    /// What the next value is, for errors.
    pub(super) fn found(&self) -> &'static str {
        match self.marker() {
            None => "nothing",
            Some(Marker::Null) => "nil",
            Some(Marker::True | Marker::False) => "a boolean",
            Some(Marker::F32 | Marker::F64) => "a float",
            Some(Marker::FixPos(_) | Marker::U8 | Marker::U16 | Marker::U32 | Marker::U64) => {
                "an integer"
            }
            Some(Marker::FixNeg(_) | Marker::I8 | Marker::I16 | Marker::I32 | Marker::I64) => {
                "a signed integer"
            }
            Some(Marker::FixStr(_) | Marker::Str8 | Marker::Str16 | Marker::Str32) => "a string",
            Some(Marker::Bin8 | Marker::Bin16 | Marker::Bin32) => "bytes",
            Some(Marker::FixArray(_) | Marker::Array16 | Marker::Array32) => "an array",
            Some(Marker::FixMap(_) | Marker::Map16 | Marker::Map32) => "a map",
            Some(_) => "an extension",
        }
    }

    fn marker(&self) -> Option<Marker> {
        self.0.first().copied().map(Marker::from_u8)
    }

    /// Moves on only if `read` finds what it looks for.
    fn read<T>(&mut self, read: impl FnOnce(&mut &'a [u8]) -> Option<T>) -> Option<T> {
        let mut rest = self.0;
        let found = read(&mut rest)?;
        self.0 = rest;
        Some(found)
    }
}

/// Takes a big-endian length of `bytes` bytes.
fn length(rest: &mut &[u8], bytes: usize) -> Option<u64> {
    let (head, tail) = rest.split_at_checked(bytes)?;
    *rest = tail;
    Some(head.iter().fold(0, |len, byte| len << 8 | u64::from(*byte)))
}
