// SPDX-License-Identifier: Apache-2.0

use super::*;

fn verdicts(cells: &[Cell]) -> Vec<Verdict> {
    cells.iter().map(|cell| cell.verdict).collect()
}

#[test]
fn the_scale_by_hand() {
    let rfc = Rfc::new().unwrap();
    for (row, (full, delta)) in rfc.scale.iter().zip([
        (4_096 * 327_680, 1_024 * 327_680),
        (8_192 * 327_680, 2_048 * 327_680),
        (32_768 * 327_680, 4_096 * 327_680),
        (131_072 * 327_680, 16_384 * 327_680),
    ]) {
        assert_eq!((row.full_bytes, row.delta_bytes), (full, delta));
        assert_eq!(row.half_full_bytes * 2, full);
    }
    let last = &rfc.scale[3];
    assert!((last.full_seconds - 42_949_672_960.0 / 12.5e9).abs() < 1e-9);
    assert!((last.delta_seconds - 5_368_709_120.0 / 12.5e9).abs() < 1e-9);
    assert_eq!(last.saved_share, 0.875);
}

#[test]
fn the_rfcs_times_are_of_half_the_bytes_in_gib() {
    let rfc = Rfc::new().unwrap();
    assert_eq!(verdicts(&rfc.transfer), [Verdict::Differs; 3]);
    assert_eq!(rfc.readings_tried, 48);
    let words: Vec<_> = rfc.readings.iter().map(|of| of.words.as_str()).collect();
    assert_eq!(
        words,
        [
            "fp16, keys or values alone, GiB taken for GB",
            "fp16, keys and values, one of 2 ranks, GiB taken for GB",
            "fp8, keys and values, GiB taken for GB",
        ]
    );
    for reading in &rfc.readings {
        assert_eq!(reading.token_bytes, 163_840);
        assert!((reading.full_seconds - 1.6).abs() < 1e-9, "{reading:?}");
        assert!((reading.delta_seconds - 0.2).abs() < 1e-9, "{reading:?}");
    }
}

#[test]
fn all_gains_but_one_are_in_reach() {
    let rfc = Rfc::new().unwrap();
    for cell in &rfc.gains {
        let expected = match cell.figure.as_str() {
            "long context: TTFT" => Verdict::Differs,
            figure if figure.ends_with("TTFT") => Verdict::Overlaps,
            _ => Verdict::Agrees,
        };
        assert_eq!(cell.verdict, expected, "{}", cell.figure);
    }
}

#[test]
fn others_agree_but_for_one_rounded_twice() {
    use Verdict::{Agrees, AgreesInBinary, Differs};
    let rfc = Rfc::new().unwrap();
    let expected = [
        Agrees,
        Agrees,
        Agrees,
        Differs,
        AgreesInBinary,
        AgreesInBinary,
        AgreesInBinary,
    ];
    assert_eq!(verdicts(&rfc.literature), expected);
    assert!(Said::new(20.8, 1, "GB").is(630.0 * 33.0 / 1000.0));
}

#[test]
fn a_figure_agrees_within_its_digits() {
    let said = Said::new(10.5, 1, "GB");
    assert_eq!(said.text(), "10.5 GB");
    for (bytes, expected) in [
        (10_450_000_000, Verdict::Agrees),
        (10_549_000_000, Verdict::Agrees),
        (10_440_000_000, Verdict::Differs),
        (11_274_289_152, Verdict::AgreesInBinary),
    ] {
        assert_eq!(said.of_bytes(bytes), expected, "{bytes}");
    }
}

#[test]
fn an_interval_agrees_where_it_is_within_and_overlaps_where_they_meet() {
    for (other, expected) in [
        ((50.0, 60.0), Verdict::Agrees),
        ((40.0, 40.0), Verdict::Agrees),
        ((20.0, 60.0), Verdict::Agrees),
        ((0.0, 20.0), Verdict::Overlaps),
        ((50.0, 61.0), Verdict::Overlaps),
        ((10.0, 70.0), Verdict::Overlaps),
        ((0.0, 19.9), Verdict::Differs),
        ((60.1, 61.0), Verdict::Differs),
    ] {
        assert_eq!(compare((20.0, 60.0), other), expected);
    }
}
