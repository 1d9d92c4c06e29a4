import pytest

from tokenmill.hardware.dmi import Module
from tokenmill.hardware.memory import count_channels, make_dram
from tokenmill.units import GIB


def modules(*places: tuple[str, str | None], width: int | None = 64) -> list[Module]:
    return [Module(locator, bank, 16 * GIB, "DDR4", width_bits=width) for locator, bank in places]


@pytest.mark.parametrize(
    ("places", "channels"),
    [
        # names with channels, from boards of the makers in the comments
        ([("DIMM_A1", "BANK 0"), ("DIMM_A2", "BANK 1"), ("DIMM_B1", "BANK 2"), ("DIMM_B2", "BANK 3")], 2),  # ASUS
        ([("DIMMA1", "P0_Node0_Channel0_Dimm0"), ("DIMMB1", "P0_Node0_Channel1_Dimm0")], 2),  # Supermicro
        # Supermicro: the second socket's banks have the names of the first, but the locators are right
        ([("P1-DIMMA1", "P0_Node0_Channel0_Dimm0"), ("P2-DIMMA1", "P0_Node0_Channel0_Dimm0")], 2),
        ([("CPU1_DIMM_A1", "NODE 1"), ("CPU1_DIMM_A2", "NODE 1"), ("CPU2_DIMM_A1", "NODE 2")], 2),  # Intel
        ([("DIMM_P0_A0", "BANK 0"), ("DIMM_P1_A0", "BANK 1")], 2),  # Gigabyte
        ([("CPU0_C0D0", None), ("CPU0_C0D1", None), ("CPU0_C1D0", None), ("CPU1_C0D0", None)], 3),  # Inspur
        ([("DDR4_A1", "BANK 0"), ("DDR4_B1", "BANK 1")], 2),  # Gigabyte
        ([("DIMM 0", "P0 CHANNEL A"), ("DIMM 1", "P0 CHANNEL A"), ("DIMM 0", "P0 CHANNEL B")], 2),  # AMI on AMD
        ([("DIMM 0", "P0 CHANNEL A"), ("DIMM 0", "P1 CHANNEL A")], 2),
        ([("A1", "P0_Node0_Channel0_Dimm0"), ("A2", "P0_Node0_Channel1_Dimm0"), ("B1", "P1_Node1_Channel0_Dimm0")], 3),
        ([("ChannelA-DIMM0", "BANK 0"), ("ChannelB-DIMM0", "BANK 2")], 2),  # Intel desktops
        ([("Controller0-ChannelA-DIMM1", "BANK 0"), ("Controller1-ChannelA-DIMM1", "BANK 0")], 2),
        ([("Controller0-ChannelA/B-DIMM0", "BANK 0/1"), ("Controller1-ChannelA/B-DIMM0", "BANK 2/3")], 2),
        ([("CPU0 Channel0 DIMM0", "NODE 0"), ("CPU1 Channel0 DIMM0", "NODE 1")], 2),
        ([("SODIMM0", "CHANNEL A DIMM0"), ("SODIMM1", "CHANNEL B DIMM0")], 2),
        # names without channels
        ([("A1", "Not Specified"), ("A7", "Not Specified")], None),  # Dell: 1 and 7 may share a channel
        ([("PROC 1 DIMM 1", None), ("PROC 1 DIMM 3", None)], None),  # HPE numbers its slots
        ([("DIMM 0", "BANK 0"), ("DIMM 1", "BANK 1")], None),
        ([("DIMM_A1", "NODE 0"), ("DIMM_A1", "NODE 1")], None),  # two sockets, the same name twice
        ([("DIMM 0", "P0 CHANNEL A"), ("DIMM 0", "P0 CHANNEL A")], None),
        ([("DIMM_A1", "BANK 0"), ("slot 2", "BANK 1")], None),
    ],
)
def test_channels_are_counted_only_where_names_tell(places: list[tuple[str, str | None]], channels: int | None) -> None:
    counted, notes = count_channels(modules(*places))
    assert counted == channels
    assert [note.about for note in notes] == ([] if channels else ["dram.channels"])


def test_narrow_devices_are_not_channels() -> None:
    counted, (note,) = count_channels(modules(("Controller0-ChannelA-DIMM0", None), width=16))
    assert counted is None
    assert "16 data bits" in note.text


def test_mixed_speeds_take_the_lowest() -> None:
    slots = [
        Module("DIMM_A1", None, 32 * GIB, "DDR5", rated_mts=6000, configured_mts=6000),
        Module("DIMM_B1", None, 32 * GIB, "DDR5", rated_mts=6000, configured_mts=4800),
        Module("DIMM_B2", None, 0),
    ]
    dram, notes = make_dram(64 * GIB, 60 * GIB, slots)
    assert (dram.mts, dram.channels, dram.nominal_gb_s, dram.slots) == (4800, 2, 76.8, 3)
    assert "1 at 4800 MT/s, 1 at 6000 MT/s" in notes[0].text
    assert "rated for 6000" in notes[1].text


def test_a_rating_is_not_a_speed() -> None:
    dram, (note,) = make_dram(GIB, GIB, [Module("DIMM_A1", None, GIB, "DDR4", rated_mts=3200)])
    assert (dram.mts, dram.nominal_gb_s) == (None, None)
    assert note.about == "dram.mts"
    assert "3200 MT/s" in note.text


def test_optane_is_never_dram() -> None:
    pmem = Module("DIMM_A2", None, 128 * GIB, "Logical non-volatile device", configured_mts=2666)
    dram, _ = make_dram(GIB, GIB, [Module("DIMM_A1", None, 16 * GIB, "DDR4", configured_mts=2666), pmem])
    assert [dimm.locator for dimm in dram.dimms] == ["DIMM_A1"]
    assert (dram.kind, dram.channels, dram.slots) == ("DDR4", 1, 2)


def test_a_hypervisors_modules_give_no_bandwidth() -> None:
    slots = [Module("DIMM_A1", None, 16 * GIB, "DDR4", rated_mts=3200, configured_mts=3200)]
    dram, (note,) = make_dram(16 * GIB, 15 * GIB, slots, virtual=True)
    assert (dram.channels, dram.mts, dram.nominal_gb_s) == (None, None, None)
    assert len(dram.dimms) == 1
    assert "hypervisor" in note.text


def test_modules_of_two_kinds_have_no_common_kind() -> None:
    slots = [Module("DIMM_A1", None, GIB, "DDR5"), Module("DIMM_B1", None, GIB, "HBM2")]
    assert make_dram(GIB, GIB, slots)[0].kind is None
