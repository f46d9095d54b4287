// SPDX-License-Identifier: Apache-2.0

//! Reading from strangers: no more than fits in memory without harm.

use std::io::Read;

use anyhow::{Result, bail};

/// The longest answer or file that is read; the metrics of large fleets are far below.
const MOST_BYTES: u64 = 64 << 20;

/// Everything that `reader` gives.
///
/// # Errors
/// It cannot be read, or has more than [`MOST_BYTES`].
pub(crate) fn read(reader: impl Read) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    reader.take(MOST_BYTES + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MOST_BYTES {
        bail!("longer than the limit of {} MiB", MOST_BYTES >> 20);
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endless_stream_ends_at_the_limit() {
        let most = std::io::repeat(b'a').take(MOST_BYTES);
        assert_eq!(read(most).unwrap().len() as u64, MOST_BYTES);
        let error = read(std::io::repeat(b'a')).unwrap_err();
        assert!(error.to_string().contains("64 MiB"), "{error}");
    }
}
