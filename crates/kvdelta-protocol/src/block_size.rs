//! A cached prefix of one block size, said in blocks of another.
//!
//! Prefill and decode workers may cut prompts into blocks of different sizes, so a prefix passes between
//! them in tokens. What is not a whole block on the other side is not there.

use kvdelta_indexer::BlockSize;
use thiserror::Error;

/// A cached prefix as a prefill worker may skip it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Translated {
    /// Whole blocks of the prefill worker from position 0 that the prefix covers; may be 0.
    pub blocks: usize,
    /// Tokens in them.
    pub tokens: usize,
    /// Tokens behind them that the decode worker holds and is sent all the same. They lie in blocks of its
    /// cache that others may share, and must not be written there a second time.
    pub sent_twice: usize,
}

/// Block sizes of which neither divides the other: their blocks share too few ends to pair them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error(
    "blocks of {decode_tokens} tokens on decode and of {prefill_tokens} on prefill: neither divides the other; sending all"
)]
pub struct UnequalBlocks {
    /// Tokens of a decode worker's block.
    pub decode_tokens: u32,
    /// Tokens of a prefill worker's block.
    pub prefill_tokens: u32,
}

/// Says `cached_blocks` blocks of the decode worker in blocks of the prefill worker, rounded down.
///
/// # Errors
/// [`UnequalBlocks`], whatever the number of blocks is.
pub fn translate(
    cached_blocks: u32,
    decode: BlockSize,
    prefill: BlockSize,
) -> Result<Translated, UnequalBlocks> {
    let (d, p) = (decode.tokens(), prefill.tokens());
    if !d.is_multiple_of(p) && !p.is_multiple_of(d) {
        return Err(UnequalBlocks {
            decode_tokens: decode.into(),
            prefill_tokens: prefill.into(),
        });
    }
    let cached = usize::try_from(cached_blocks)
        .unwrap_or(usize::MAX)
        .saturating_mul(d);
    let blocks = cached / p;
    let tokens = blocks * p;
    Ok(Translated {
        blocks,
        tokens,
        sent_twice: cached - tokens,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn size(tokens: u32) -> BlockSize {
        BlockSize::try_from(tokens).expect("not 0")
    }

    // CASES B29.
    #[test]
    fn speaks_in_tokens_and_rounds_down() {
        let cases = [
            // decode size, blocks cached, prefill size; blocks, tokens, tokens sent twice
            (16, 3, 32, 1, 32, 16),
            (64, 1, 16, 4, 64, 0),
            (32, 5, 32, 5, 160, 0),
            (16, 1, 32, 0, 0, 16),
            (16, 0, 32, 0, 0, 0),
            (1, 31, 16, 1, 16, 15),
            (16, 1, 1, 16, 16, 0),
        ];
        for (decode, cached, prefill, blocks, tokens, sent_twice) in cases {
            let expected = Translated {
                blocks,
                tokens,
                sent_twice,
            };
            let said = translate(cached, size(decode), size(prefill));
            assert_eq!(
                said,
                Ok(expected),
                "{cached} of {decode} in blocks of {prefill}"
            );
        }
    }

    #[test]
    fn refuses_sizes_of_which_neither_divides_the_other() {
        for (decode, prefill) in [(16, 24), (24, 16), (u32::MAX, 2)] {
            // 0 and 6 blocks too, though 6 of 16 would end where 4 of 24 do.
            for cached in [0, 3, 6] {
                let refused = translate(cached, size(decode), size(prefill)).expect_err("refused");
                assert_eq!(
                    (refused.decode_tokens, refused.prefill_tokens),
                    (decode, prefill)
                );
                assert!(
                    refused
                        .to_string()
                        .contains(&format!("{prefill} on prefill"))
                );
            }
        }
    }

    fn two_sizes() -> impl Strategy<Value = (u32, u32)> {
        let related =
            (1..=65_535_u32, 1..=65_535_u32).prop_map(|(base, times)| (base, base * times));
        prop_oneof![
            (1..=u32::MAX, 1..=u32::MAX),
            related.clone(),
            related.prop_map(|(base, multiple)| (multiple, base)),
        ]
    }

    proptest! {
        #[test]
        fn covers_no_token_that_is_not_cached(cached in any::<u32>(), (d, p) in two_sizes()) {
            let (decode, prefill) = (size(d), size(p));
            match translate(cached, decode, prefill) {
                Err(_) => prop_assert!(d % p != 0 && p % d != 0),
                Ok(said) => {
                    let have = u128::from(cached) * u128::from(d);
                    prop_assert_eq!(said.tokens, said.blocks * prefill.tokens());
                    prop_assert!(said.sent_twice < prefill.tokens());
                    prop_assert_eq!((said.tokens + said.sent_twice) as u128, have);
                }
            }
        }

        #[test]
        fn comes_back_to_no_more_than_it_was(cached in 0..1_000_000_u32, small in 1..512_u32, times in 1..64_u32, up: bool) {
            let (small, large) = (size(small), size(small * times));
            let (from, to) = if up { (small, large) } else { (large, small) };
            let there = translate(cached, from, to).expect("one divides the other");
            let blocks = u32::try_from(there.blocks).expect("small");
            let back = translate(blocks, to, from).expect("one divides the other");
            prop_assert!(back.blocks <= usize::try_from(cached).expect("small"));
            prop_assert!(up || back.blocks == usize::try_from(cached).expect("small"));
        }
    }
}
