use super::*;
use crate::body::{Buffers, FREE_BYTES};

const BOTH: [Coding; 2] = [Coding::Gzip, Coding::Deflate];

/// Inflates in parts of `part_bytes`; answers are not larger than `bytes_max`.
fn inflated(
    coding: Coding,
    bytes: &[u8],
    part_bytes: usize,
    bytes_max: usize,
    buffers: &Buffers,
) -> Result<Bytes, Refusal> {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(async {
        let mut held = buffers.hold_nothing();
        let mut inflating = Inflating::new(coding, bytes_max);
        for part in bytes.chunks(part_bytes) {
            inflating.push(part, 0, &mut held).await?;
        }
        inflating.finish()
    })
}

fn whole(coding: Coding, bytes: &[u8]) -> Result<Bytes, Refusal> {
    inflated(coding, bytes, usize::MAX, 1 << 20, &Buffers::new(1 << 20))
}

#[test]
fn what_was_deflated_comes_back_in_any_parts() {
    let plain: Vec<u8> = (0..200_000_u32).map(|at| (at % 251) as u8).collect();
    for coding in BOTH {
        let bytes = coding.deflate(&[&plain[..5], &plain[5..]]).unwrap();
        for part_bytes in [1, 7, 4096, usize::MAX] {
            let back = inflated(coding, &bytes, part_bytes, plain.len(), &Buffers::new(1 << 20));
            assert_eq!(back.unwrap(), plain, "{coding:?} by {part_bytes}");
        }
        assert_eq!(whole(coding, &coding.deflate(&[]).unwrap()).unwrap(), Bytes::new());
    }
}

#[test]
fn what_is_cut_off_damaged_or_too_long_is_refused() {
    for coding in BOTH {
        let bytes = coding.deflate(&[&[7; 5000]]).unwrap();
        for end in 0..bytes.len() {
            let refused = whole(coding, &bytes[..end]).unwrap_err();
            assert_eq!(refused.status(), StatusCode::BAD_REQUEST, "{coding:?} cut at {end}");
        }
        let longer = [&bytes[..], b"more"].concat();
        assert_eq!(whole(coding, &longer).unwrap_err().status(), StatusCode::BAD_REQUEST);
        let mut damaged = bytes.clone();
        *damaged.last_mut().unwrap() ^= 1;
        assert_eq!(whole(coding, &damaged).unwrap_err().status(), StatusCode::BAD_REQUEST);
        let other = BOTH.into_iter().find(|other| *other != coding).unwrap();
        assert_eq!(whole(other, &bytes).unwrap_err().status(), StatusCode::BAD_REQUEST);
    }
}

#[test]
fn a_bomb_is_refused_before_it_takes_more_than_a_plain_body() {
    let limit = 256 << 10;
    for coding in BOTH {
        let bomb = coding.deflate(&[&vec![0; 8 << 20]]).unwrap();
        assert!(bomb.len() < 64 << 10, "{}", bomb.len());
        // Memory for a plain body of the limit, and a step; not for the bomb.
        let buffers = Buffers::new(limit + STEP_BYTES - FREE_BYTES);
        let refused = inflated(coding, &bomb, usize::MAX, limit, &buffers).unwrap_err();
        let found = (refused.status(), refused.reason());
        assert_eq!(found, (StatusCode::PAYLOAD_TOO_LARGE, Some("decompressed")), "{coding:?}");
        let fits = coding.deflate(&[&vec![0; limit]]).unwrap();
        assert_eq!(inflated(coding, &fits, usize::MAX, limit, &buffers).unwrap().len(), limit);
        let over = coding.deflate(&[&vec![0; limit + 1]]).unwrap();
        assert!(inflated(coding, &over, usize::MAX, limit, &buffers).is_err());
        let little = Buffers::new(4096);
        let busy = inflated(coding, &fits, usize::MAX, limit, &little).unwrap_err();
        assert_eq!(busy.reason(), Some("buffers"));
    }
}

#[test]
fn answers_are_compressed_for_those_who_want_nothing_else() {
    let wanted = |text: &'static str| {
        let mut headers = HeaderMap::new();
        headers.insert(header::ACCEPT_ENCODING, text.parse().unwrap());
        Coding::wanted(&headers)
    };
    for (text, coding) in [
        ("gzip", Some(Coding::Gzip)),
        ("deflate", Some(Coding::Deflate)),
        ("GZip;q=0.5, identity;q=0.1", Some(Coding::Gzip)),
        ("gzip;q=0, deflate", Some(Coding::Deflate)),
        // What HTTP libraries say of themselves.
        ("gzip, deflate", None),
        ("gzip, deflate, br, zstd", None),
        ("identity", None),
        ("gzip;q=0", None),
        ("*", None),
        ("br", None),
        ("", None),
    ] {
        assert_eq!(wanted(text), coding, "{text}");
    }
    assert_eq!(Coding::wanted(&HeaderMap::new()), None);
}
