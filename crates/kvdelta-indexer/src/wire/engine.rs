//! Events of vLLM and SGLang.
//!
//! One decoder reads both: they share the names of maps and the order of arrays, and where an array of
//! vLLM has the LoRA name (slot 7), SGLang puts a map with the salt. vLLM 0.31 sends maps
//! (`vllm/distributed/kv_events.py`), SGLang arrays; each is taken from either. What differs in meaning
//! is told by [`Dialect`](crate::wire::normalize::Dialect).

use crate::event::Source;
use crate::hash::MediaHash;
use crate::ids::EngineHash;
use crate::wire::batch::{Place, WireEvent, WireStored};
use crate::wire::extra_keys;
use crate::wire::msgpack::Cursor;
use crate::wire::skipped::{Skipped, shown};

/// Slots of an array that have a meaning; what follows is newer than this decoder.
const SLOTS: usize = 16;

/// Reads one event from its bytes, which are one whole value.
pub(super) fn decode(bytes: &[u8]) -> Result<WireEvent<'_>, Skipped> {
    let fields = Fields::of(bytes)?;
    match fields.tag {
        "BlockStored" => stored(&fields).map(WireEvent::Stored),
        "BlockRemoved" => Ok(WireEvent::Removed {
            engine_hashes: fields.must("block_hashes", fields.hashes, hashes)?,
            place: fields.place()?,
        }),
        "AllBlocksCleared" => Ok(WireEvent::Cleared {
            owner: fields.may("ownership", fields.owner, Cursor::text)?,
        }),
        unknown => Err(Skipped::UnknownType(shown(unknown))),
    }
}

/// The bytes of the fields that an event has, whichever way it was encoded.
#[derive(Debug, Default)]
struct Fields<'a> {
    tag: &'a str,
    hashes: Option<&'a [u8]>,
    parent: Option<&'a [u8]>,
    tokens: Option<&'a [u8]>,
    block_size: Option<&'a [u8]>,
    lora_id: Option<&'a [u8]>,
    lora_name: Option<&'a [u8]>,
    salt: Option<&'a [u8]>,
    extra_keys: Option<&'a [u8]>,
    media: Option<&'a [u8]>,
    medium: Option<&'a [u8]>,
    locality: Option<&'a [u8]>,
    owner: Option<&'a [u8]>,
    group: Option<&'a [u8]>,
    kind: Option<&'a [u8]>,
    source: Option<&'a [u8]>,
}

impl<'a> Fields<'a> {
    fn of(bytes: &'a [u8]) -> Result<Self, Skipped> {
        let mut cursor = Cursor::new(bytes);
        let mut fields = Self::default();
        if let Some(len) = cursor.map() {
            for _ in 0..len {
                let (key, value) = (cursor.value(), cursor.value());
                if let (Some(key), Some(value)) = (key, value) {
                    fields.set(Cursor::new(key).text(), value)?;
                }
            }
        } else if let Some(len) = cursor.array() {
            let slots = std::iter::from_fn(|| cursor.value());
            let slots: Vec<_> = slots.take(len.min(SLOTS)).collect();
            fields.read_tag(slots.first().copied().unwrap_or_default())?;
            fields.set_slots(&slots);
        } else {
            return Err(malformed("unnamed", "whole", cursor));
        }
        if fields.tag.is_empty() {
            return Err(malformed("unnamed", "type", Cursor::new(&[])));
        }
        Ok(fields)
    }

    fn read_tag(&mut self, value: &'a [u8]) -> Result<(), Skipped> {
        let mut cursor = Cursor::new(value);
        let tag = cursor.text();
        self.tag = tag.ok_or_else(|| malformed("unnamed", "type", cursor))?;
        Ok(())
    }

    fn set(&mut self, key: Option<&str>, value: &'a [u8]) -> Result<(), Skipped> {
        let field = match key {
            Some("type") => return self.read_tag(value),
            Some("block_hashes") => &mut self.hashes,
            Some("parent_block_hash") => &mut self.parent,
            Some("token_ids") => &mut self.tokens,
            Some("block_size") => &mut self.block_size,
            Some("lora_id") => &mut self.lora_id,
            Some("lora_name") => &mut self.lora_name,
            Some("cache_salt") => &mut self.salt,
            Some("extra_keys") => &mut self.extra_keys,
            Some("block_mm_infos") => &mut self.media,
            Some("medium") => &mut self.medium,
            Some("locality") => &mut self.locality,
            Some("ownership") => &mut self.owner,
            Some("group_idx") => &mut self.group,
            Some("kv_cache_spec_kind") => &mut self.kind,
            Some("source") => &mut self.source,
            _ => return Ok(()),
        };
        *field = Some(value);
        Ok(())
    }

    fn set_slots(&mut self, slots: &[&'a [u8]]) {
        let at = |slot: usize| slots.get(slot).copied();
        let tail = |from| slots.get(from..).unwrap_or_default();
        match self.tag {
            "BlockStored" => {
                self.hashes = at(1);
                self.parent = at(2);
                self.tokens = at(3);
                self.block_size = at(4);
                self.lora_id = at(5);
                self.medium = at(6);
                self.lora_name = at(7);
                self.extra_keys = at(8);
                self.set_metadata_of_slot_7();
                self.set_tail(tail(9));
            }
            "BlockRemoved" => {
                self.hashes = at(1);
                self.medium = at(2);
                self.set_tail(tail(3));
            }
            "AllBlocksCleared" => self.owner = at(1),
            _ => {}
        }
    }

    /// SGLang's map of `cache_salt` and `session_id` where vLLM has the LoRA name.
    fn set_metadata_of_slot_7(&mut self) {
        let mut cursor = Cursor::new(self.lora_name.unwrap_or_default());
        let Some(len) = cursor.map() else { return };
        self.lora_name = None;
        for _ in 0..len {
            let key = cursor.value().and_then(|key| Cursor::new(key).text());
            match (key, cursor.value()) {
                (Some("cache_salt"), salt) => self.salt = salt,
                (Some("lora_name"), name) => self.lora_name = name,
                _ => {}
            }
        }
    }

    /// What follows the fixed slots: group, kind, window, locality, owner. Older engines left out what
    /// they did not know and could put the media first, so there the types have to tell.
    fn set_tail(&mut self, tail: &[&'a [u8]]) {
        let tail = tail.get(..5).unwrap_or(tail);
        let at = |slot: usize| {
            tail.get(slot)
                .copied()
                .filter(|it| !Cursor::new(it).is_nil())
        };
        let fits = |slot, found| at(slot).is_none_or(|it| Cursor::new(it).found() == found);
        let (number, text) = ("an integer", "a string");
        if tail.len() >= 4
            && fits(0, number)
            && fits(1, text)
            && fits(2, number)
            && fits(3, text)
            && fits(4, text)
        {
            self.group = at(0);
            self.kind = at(1);
            self.locality = at(3);
            self.owner = at(4);
            return;
        }
        for it in tail {
            match Cursor::new(it).found() {
                "an integer" if self.group.is_none() => self.group = Some(it),
                "a string" => self.kind = Some(it),
                "an array" => self.media = Some(it),
                _ => {}
            }
        }
    }

    /// A field that may be missing or nil.
    fn may<T>(
        &self,
        field: &'static str,
        value: Option<&'a [u8]>,
        read: impl FnOnce(&mut Cursor<'a>) -> Option<T>,
    ) -> Result<Option<T>, Skipped> {
        let Some(mut cursor) = value.map(Cursor::new).filter(|value| !value.is_nil()) else {
            return Ok(None);
        };
        match read(&mut cursor) {
            Some(value) => Ok(Some(value)),
            None => Err(malformed(self.event(), field, cursor)),
        }
    }

    /// A field that must be there.
    fn must<T>(
        &self,
        field: &'static str,
        value: Option<&'a [u8]>,
        read: impl FnOnce(&mut Cursor<'a>) -> Option<T>,
    ) -> Result<T, Skipped> {
        let missing = Cursor::new(value.unwrap_or_default());
        self.may(field, value, read)?
            .ok_or_else(|| malformed(self.event(), field, missing))
    }

    fn place(&self) -> Result<Place<'a>, Skipped> {
        Ok(Place {
            medium: self.may("medium", self.medium, Cursor::text)?,
            locality: self.may("locality", self.locality, Cursor::text)?,
            owner: self.may("ownership", self.owner, Cursor::text)?,
            group: self.may("group_idx", self.group, |group| {
                u32::try_from(group.unsigned()?).ok()
            })?,
            kind: self.may("kv_cache_spec_kind", self.kind, Cursor::text)?,
        })
    }

    fn event(&self) -> &'static str {
        match self.tag {
            "BlockStored" => "BlockStored",
            "BlockRemoved" => "BlockRemoved",
            _ => "AllBlocksCleared",
        }
    }
}

fn stored<'a>(fields: &Fields<'a>) -> Result<WireStored<'a>, Skipped> {
    let engine_hashes = fields.must("block_hashes", fields.hashes, hashes)?;
    let (tokens, eagle) = fields.must("token_ids", fields.tokens, tokens)?;
    let lora = fields.may("lora_name", fields.lora_name, Cursor::text)?;
    let lora = lora.filter(|name| !name.is_empty());
    if lora.is_none() {
        named_lora(fields)?;
    }
    let blocks = engine_hashes.len();
    let keys = fields.may("extra_keys", fields.extra_keys, |keys| {
        extra_keys::read(keys, lora, blocks)
    })?;
    let keys = keys.unwrap_or_default();
    let media = fields.may("block_mm_infos", fields.media, |infos| media(infos, blocks))?;
    let salt = fields.may("cache_salt", fields.salt, Cursor::text)?;
    Ok(WireStored {
        parent: fields.may("parent_block_hash", fields.parent, hash)?,
        engine_hashes,
        tokens,
        eagle,
        block_size: fields.must("block_size", fields.block_size, Cursor::unsigned)?,
        lora,
        salt: salt.filter(|salt| !salt.is_empty()).or(keys.salt),
        media: media.unwrap_or(keys.media),
        unattributed: keys.unattributed,
        place: fields.place()?,
        // A hint that nothing rests on: what is not understood counts as not said.
        source: match fields.source.and_then(|it| Cursor::new(it).text()) {
            Some("local") => Some(Source::Local),
            Some("transferred") => Some(Source::Transferred),
            _ => None,
        },
    })
}

/// Refuses an adapter's number without its name: its blocks must not pass for the base model's.
fn named_lora(fields: &Fields<'_>) -> Result<(), Skipped> {
    let Some(mut id) = fields.lora_id.map(Cursor::new).filter(|id| !id.is_nil()) else {
        return Ok(());
    };
    match (id.unsigned(), id.text()) {
        (Some(0), _) => Ok(()),
        (Some(id), _) => Err(Skipped::UnnamedLora(id.to_string())),
        (None, Some(id)) => Err(Skipped::UnnamedLora(shown(id))),
        (None, None) => Err(malformed("BlockStored", "lora_id", id)),
    }
}

/// A hash: an integer, or bytes of which the last 64 bits count.
fn hash(cursor: &mut Cursor<'_>) -> Option<EngineHash> {
    if let Some(bits) = cursor.bits() {
        return Some(EngineHash(bits));
    }
    let bytes = cursor.bytes().filter(|bytes| !bytes.is_empty())?;
    let last = bytes.iter().skip(bytes.len().saturating_sub(8));
    Some(EngineHash(
        last.fold(0, |hash, byte| hash << 8 | u64::from(*byte)),
    ))
}

fn hashes(cursor: &mut Cursor<'_>) -> Option<Vec<EngineHash>> {
    let mut found = *cursor;
    let len = found.array()?;
    let hashes: Option<Vec<_>> = (0..len).map(|_| hash(&mut found)).collect();
    hashes.inspect(|_| *cursor = found)
}

/// Tokens, and whether they came as pairs of neighbours: `[(a, b), (b, c)]` is a, b, c.
fn tokens(cursor: &mut Cursor<'_>) -> Option<(Vec<u32>, bool)> {
    let token = |from: &mut Cursor<'_>| u32::try_from(from.unsigned()?).ok();
    let mut found = *cursor;
    let len = found.array()?;
    if found.found() != "an array" || len == 0 {
        let tokens: Option<Vec<_>> = (0..len).map(|_| token(&mut found)).collect();
        return tokens.map(|tokens| (tokens, false));
    }
    let mut tokens = Vec::with_capacity(len + 1);
    for _ in 0..len {
        if found.array()? != 2 {
            return None;
        }
        let (first, second) = (token(&mut found)?, token(&mut found)?);
        match tokens.last() {
            None => tokens.push(first),
            Some(last) if *last == first => {}
            Some(_) => return None,
        }
        tokens.push(second);
    }
    Some((tokens, true))
}

/// Dynamo's `block_mm_infos`: for each block nil, or the media with their routing hashes.
fn media(cursor: &mut Cursor<'_>, blocks: usize) -> Option<Vec<Vec<MediaHash>>> {
    let len = cursor.array()?;
    if len != blocks && len != 0 {
        return None;
    }
    (0..len)
        .map(|_| {
            let mut info = Cursor::new(cursor.value()?);
            if info.is_nil() {
                return Some(Vec::new());
            }
            let mut objects = Cursor::new(field(&mut info, "mm_objects")?);
            let count = objects.array()?;
            (0..count)
                .map(|_| {
                    let mut object = Cursor::new(objects.value()?);
                    Cursor::new(field(&mut object, "mm_hash")?)
                        .unsigned()
                        .map(MediaHash)
                })
                .collect()
        })
        .collect()
}

/// The value of `name` in a map; in an array, which has no names, the first one.
fn field<'a>(of: &mut Cursor<'a>, name: &str) -> Option<&'a [u8]> {
    if let Some(len) = of.array() {
        return (len > 0).then(|| of.value())?;
    }
    let mut found = None;
    for _ in 0..of.map()? {
        let (key, value) = (of.value()?, of.value()?);
        if Cursor::new(key).text() == Some(name) {
            found = Some(value);
        }
    }
    found
}

fn malformed(event: &'static str, field: &'static str, at: Cursor<'_>) -> Skipped {
    Skipped::Malformed {
        event,
        field,
        found: at.found().to_owned(),
    }
}
