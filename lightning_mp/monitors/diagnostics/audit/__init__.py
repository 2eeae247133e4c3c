"""The dtype that each module and operation of a step really used."""
