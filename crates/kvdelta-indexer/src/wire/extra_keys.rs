//! What besides its tokens decided a block's hash, as vLLM publishes it.
//!
//! vLLM 0.31 (`vllm/v1/core/kv_cache_utils.py`, `to_event_extra_keys`) sends for each block, in this
//! order and without tags: the LoRA name, a pair of identifier and offset for each image, the salt (only
//! for the first block of a prompt) and a digest of prompt embeddings as bytes. Older ones sent an image
//! as a bare string, so a bare string may be a salt or an image. Dynamo marks what it passes to vLLM:
//! a salt begins with [`SALT_PREFIX`], an image is its routing hash in 16 hexadecimal digits and 48
//! zeros. Everything else cannot be attributed, and a block that has it is not a block of its tokens.

use crate::hash::MediaHash;
use crate::wire::msgpack::Cursor;
use crate::wire::skipped::{Skipped, shown};

/// What Dynamo puts before a salt (`components/src/dynamo/vllm/handlers.py`).
const SALT_PREFIX: &str = "dynamo-cache-salt:";

/// What the extra keys of one event say.
#[derive(Debug, Default)]
pub(super) struct ExtraKeys<'a> {
    pub(super) salt: Option<&'a str>,
    /// By block; empty if there are none.
    pub(super) media: Vec<Vec<MediaHash>>,
    /// The first block with a key of unknown meaning.
    pub(super) unattributed: Option<(usize, Skipped)>,
}

/// Reads an array that has one entry for each of `blocks` blocks, or is empty.
pub(super) fn read<'a>(
    cursor: &mut Cursor<'a>,
    lora: Option<&str>,
    blocks: usize,
) -> Option<ExtraKeys<'a>> {
    let mut keys = ExtraKeys::default();
    let mut found = *cursor;
    let len = found.array()?;
    if len != blocks && len != 0 {
        return None;
    }
    for block in 0..len {
        let mut of_block = Cursor::new(found.value()?);
        if of_block.is_nil() {
            continue;
        }
        let mut lora = lora;
        for _ in 0..of_block.array()? {
            let key = of_block.value()?;
            if !keys.attribute(block, key, &mut lora) {
                let key = shown(Cursor::new(key).text().unwrap_or(Cursor::new(key).found()));
                keys.unattributed = Some((block, Skipped::UnattributedKey { block, key }));
                return Some(keys);
            }
        }
    }
    Some(keys)
}

impl<'a> ExtraKeys<'a> {
    /// Whether the key is understood. `lora` is the name that is still to come.
    fn attribute(&mut self, block: usize, key: &'a [u8], lora: &mut Option<&str>) -> bool {
        let mut cursor = Cursor::new(key);
        let (text, is_pair) = match cursor.array() {
            Some(len) => (cursor.text().filter(|_| len == 2), true),
            None => (cursor.text(), false),
        };
        let Some(text) = text else { return false };
        if !is_pair && lora.is_some_and(|name| name == text) {
            *lora = None;
            return true;
        }
        if let Some(media) = marked_media(text) {
            // Kept only as far as a block has media: most events have none.
            if self.media.len() <= block {
                self.media.resize(block + 1, Vec::new());
            }
            self.media[block].push(media);
            return true;
        }
        match text.strip_prefix(SALT_PREFIX) {
            Some(salt) if !is_pair && block == 0 => {
                self.salt = Some(salt).filter(|salt| !salt.is_empty());
                true
            }
            _ => false,
        }
    }
}

/// The routing hash in an image's identifier, if Dynamo put it there.
fn marked_media(identifier: &str) -> Option<MediaHash> {
    let (hash, padding) = identifier.split_at_checked(16)?;
    let is_marked = padding.len() == 48
        && padding.bytes().all(|byte| byte == b'0')
        && hash.bytes().all(|digit| digit.is_ascii_hexdigit());
    let hash = is_marked.then(|| u64::from_str_radix(hash, 16).ok())??;
    Some(MediaHash(hash))
}
