"""Operations with a fixed-size state per sequence: convolutions and recurrences over ragged batches."""
